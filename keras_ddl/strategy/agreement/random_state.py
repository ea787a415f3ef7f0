"""Random states that are equal on all ranks, and streams of random numbers that are not."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.comparison import digest
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf

# Distance between the seeds of neighbouring ranks. It is odd, so its multiples all differ, and it is the golden ratio
# times 2**31, far from the small steps in which users number their seeds.
_SEED_STRIDE = 1_327_217_885


def seed_offset(rank: int) -> int:
    """Returns what to add to a random seed on `rank` if ranks are to draw different numbers; 0 on rank 0.

    Only TensorFlow's stateful operations in `strategy.run` use it. Keras's seeds are equal on all ranks.
    """
    return rank * _SEED_STRIDE % 2**31


class RandomState:
    """Keeps the random states of all ranks equal, because each rank shuffles batches before it takes its rows.

    Python's and NumPy's generators follow rank 0. TensorFlow's global seed is the script's if it has set one on all
    ranks; else this class sets a fresh seed, equal on all ranks ("own"). Under a global seed Keras shuffles arrays in
    the same order in every epoch, so with an own seed arrays are shuffled from `next_shuffle_seed` instead, which draws
    from `shuffles`.
    """

    _own_seeds: ClassVar[set[int]] = set()

    def __init__(self, size: int, seed: int | None) -> None:
        self.size = size
        if size > 1 or history.takes_newcomers():
            seed, fresh = communicator.broadcast_object((seed, os.urandom(8)), name="keras_ddl/seed")
        else:
            fresh = os.urandom(8)
        self.shuffles = random.Random(fresh)
        if seed is not None:
            keras.utils.set_random_seed(seed)
        self.agree()

    def agree(self) -> None:
        """Makes the random states of all ranks equal to rank 0's."""
        if self.size == 1 and not history.takes_newcomers():
            return
        states, rank_0_states = communicator.as_one(self._exchange)
        _follow(rank_0_states)
        seeds = [state[2] for state in states]
        if seeds[0] is None:
            own = self.shuffles.randrange(1, 2**31)
            self._own_seeds.add(own)
            tf.random.set_seed(own)
        elif any(seed != seeds[0] for seed in seeds):
            tf.random.set_seed(seeds[0])

    def _exchange(self) -> tuple[list[Any], Any]:
        """Returns each rank's digests of its states and the global seed, and rank 0's states if the digests differ."""
        mine = (_digest(random.getstate()), _digest(np.random.get_state()), tf_compat.global_seed())
        states = communicator.all_gather_object(mine, name="keras_ddl/random_state")
        return states, _states_of_rank_0() if any(state[:2] != states[0][:2] for state in states) else None

    def agree_python(self, digests: Sequence[bytes]) -> None:
        """Makes Python's generators equal if their gathered digests differ."""
        if any(digest != digests[0] for digest in digests):
            _follow(_states_of_rank_0())

    @property
    def seeded_by_script(self) -> bool:
        """Whether the script, not this class, has set TensorFlow's global seed."""
        return tf_compat.global_seed() not in (None, *self._own_seeds)

    def next_shuffle_seed(self) -> tuple[int, int]:
        """Returns a fresh seed, equal on all ranks if all ranks call this equally often."""
        return self.shuffles.randrange(2**31), self.shuffles.randrange(2**31)


def _states_of_rank_0() -> Any:
    return communicator.broadcast_object(
        (random.getstate(), np.random.get_state()), name="keras_ddl/random_state_of_rank_0"
    )


def _follow(states: Any) -> None:
    if states is not None:
        random.setstate(states[0])
        np.random.set_state(states[1])


def python_random_digest() -> bytes:
    """Returns a digest of the state of Python's generator, which shuffles keras.utils.PyDataset."""
    return _digest(random.getstate())


def _digest(value: Any) -> bytes:
    return digest(pickle.dumps(value))
