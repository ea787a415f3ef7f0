"""What ranks agree on around training: random seeds, the model, its variables, metrics, and when to stop.

Everything here is COLLECTIVE, blocking, and runs between steps, so plain NumPy arrays and Python objects do.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator.comparison import digest, require_equal_lists
from keras_ddl.communicator.dtypes import DTYPES
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.models import named_optimizers_of, optimizers_of, plain_name
from keras_ddl.compat.optimizers import trained_variables
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import sharded_slots, whole_slots
from keras_ddl.strategy.extended import broadcast_value


class RandomState:
    """Keeps the ranks' random states in step, because each rank cuts its rows out of batches it shuffles itself.

    Python's and NumPy's generators follow rank 0. TensorFlow's global seed is the script's if it has set one on all
    ranks; else a fresh one, the same on all ranks, which is here called own: under a global seed Keras shuffles arrays
    in the same order in every epoch, so arrays are then shuffled from `next_shuffle_seed` instead.
    """

    _own_seeds: ClassVar[set[int]] = set()

    def __init__(self, rank: int, size: int, seed: int | None) -> None:
        self.rank = rank
        self.size = size
        if size > 1:
            seed, fresh = communicator.broadcast_object((seed, os.urandom(8)), name="keras_ddl/seed")
        else:
            fresh = os.urandom(8)
        self._shuffles = random.Random(fresh)
        if seed is not None:
            keras.utils.set_random_seed(seed)
        self.agree()

    def agree(self) -> None:
        """Makes the random states of all ranks equal to rank 0's where they are not."""
        if self.size == 1:
            return
        mine = (_digest(random.getstate()), _digest(np.random.get_state()), tf_compat.global_seed())
        states = communicator.all_gather_object(mine, name="keras_ddl/random_state")
        if any(state[:2] != states[0][:2] for state in states):
            self._follow_rank_0()
        seeds = [state[2] for state in states]
        if seeds[0] is None:
            own = self._shuffles.randrange(1, 2**31)
            self._own_seeds.add(own)
            tf.random.set_seed(own)
        elif any(seed != seeds[0] for seed in seeds):
            tf.random.set_seed(seeds[0])

    def agree_python(self, digests: Sequence[bytes]) -> None:
        """Makes Python's generators equal if their gathered digests are not."""
        if any(digest != digests[0] for digest in digests):
            self._follow_rank_0()

    @property
    def seeded_by_script(self) -> bool:
        """Whether the script, not this class, has set TensorFlow's global seed."""
        return tf_compat.global_seed() not in (None, *self._own_seeds)

    def next_shuffle_seed(self) -> tuple[int, int]:
        """Returns a fresh seed, the same on all ranks as long as all ask equally often."""
        return self._shuffles.randrange(2**31), self._shuffles.randrange(2**31)

    def shuffles_state(self) -> list[Any]:
        """Returns the state from which `next_shuffle_seed` goes on, as JSON."""
        version, internal, gauss = self._shuffles.getstate()
        return [version, list(internal), gauss]

    def set_shuffles_state(self, state: list[Any]) -> None:
        """Goes on from a state of `shuffles_state`, here or in another process."""
        self._shuffles.setstate((state[0], tuple(state[1]), state[2]))

    def _follow_rank_0(self) -> None:
        state = (random.getstate(), np.random.get_state()) if self.rank == 0 else None
        python_state, numpy_state = communicator.broadcast_object(state, name="keras_ddl/random_state_of_rank_0")
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def python_random_digest() -> bytes:
    """Returns a digest of the state of Python's generator, which shuffles keras.utils.PyDataset."""
    return _digest(random.getstate())


def check_same_model(model: keras.Model) -> None:
    """Checks that all ranks train the same model with the same optimizer.

    Raises: RankMismatchError: on every rank, with the first variable that differs.
    Cost: 32 bytes per rank; the whole lists only when they differ.
    """
    lines = [_describe(variable) for variable in all_variables(model)]
    require_equal_lists(
        lines,
        name_of(model, "variables"),
        "All ranks must train the same model: variables of equal path, shape and dtype in the same order.",
        "Build and compile the model the same way on every rank.",
        entry="variable",
    )


def build_optimizers_as_rank_0(model: keras.Model, rank: int) -> None:
    """Builds the optimizers that a callback of rank 0 has built, as one does that restores them.

    Else the first step builds them, as in one process.
    """
    optimizers = named_optimizers_of(model)
    place = {id(variable): number for number, variable in enumerate(model.variables)}
    mine = {
        name: [place.get(id(variable)) for variable in trained]
        for name, each in optimizers.items()
        if rank == 0 and each.built and (trained := trained_variables(each)) is not None
    }
    built = communicator.broadcast_object(mine, name=name_of(model, "built_optimizers"))
    for name, places in built.items():
        optimizer = optimizers.get(name)
        if optimizer is not None and not optimizer.built and None not in places:
            optimizer.build([model.variables[number] for number in places])


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the model and of all its optimizers, each once. Not the metrics': ranks' differ."""
    optimizers = [variable for each in optimizers_of(model) for variable in each.variables]
    return list({id(v): v for v in [*model.variables, *optimizers]}.values())


def broadcast_variables(variables: Iterable[keras.Variable], root: int = 0) -> None:
    """Gives all ranks the values of rank `root`."""
    plain, variables = [], list(variables)
    whole_slots.agree(whole_slots.slots_in(variables), root)
    for variable in variables:
        if sharded_slots.of(variable) is not None:
            continue
        if keras.backend.is_float_dtype(variable.dtype) or variable.dtype in DTYPES:
            plain.append(variable.value)
        else:
            variable.assign(broadcast_value(variable.numpy(), f"keras_ddl/{plain_name(variable.path)}", root))
    if plain:
        ops.broadcast_variables(plain, root=root)


def name_of(model: keras.Model, what: str) -> str:
    """Returns the name of a collective that concerns a model."""
    return f"keras_ddl/{plain_name(model.name)}/{what}"


def any_rank(flag: bool, name: str) -> bool:
    """Whether any rank says so."""
    return any_rank_of([flag], name)[0]


def any_rank_of(flags: Sequence[bool], name: str) -> list[bool]:
    """Whether any rank says so, of each of several questions."""
    return [bool(each) for each in communicator.all_reduce_array(np.array(flags, np.int32), op="max", name=name)]


def _describe(variable: keras.Variable) -> str:
    return f"{plain_name(variable.path)} {variable.dtype}[{'x'.join(map(str, variable.shape))}]"


def _digest(value: Any) -> bytes:
    return digest(pickle.dumps(value))
