"""What ranks agree on around training: random seeds, the model, its variables, metrics, and when to stop.

Everything here is COLLECTIVE, blocking, and runs between steps, so plain NumPy arrays and Python objects do.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator.comparison import first_difference
from keras_ddl.communicator.dtypes import DTYPES
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.keras import keras, optimizers_of, plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import RankMismatchError
from keras_ddl.strategy import metric_state
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


def check_same_model(model: keras.Model, rank: int) -> None:
    """Checks that all ranks train the same model with the same optimizer.

    Raises: RankMismatchError: on every rank, with the first variable that differs.
    Cost: 32 bytes per rank; the whole lists only when they differ.
    """
    lines = [_describe(variable) for variable in all_variables(model)]
    found = first_difference(communicator.communicator_of(None), lines, name_of(model, "variables"))
    if found is not None:
        raise RankMismatchError(
            "All ranks must train the same model: variables of equal path, shape and dtype in the same order. "
            f"Received: variable {found.position} is {found.of_rank_0} on rank 0 and {found.of_rank} on rank "
            f"{found.rank} (rank {rank}). Build and compile the model alike on every rank."
        )


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the model and of all its optimizers, each once. Not the metrics': ranks' differ."""
    optimizers = [variable for each in optimizers_of(model) for variable in each.variables]
    return list({id(v): v for v in [*model.variables, *optimizers]}.values())


def broadcast_variables(variables: Iterable[keras.Variable], root: int = 0) -> None:
    """Gives all ranks the values of rank `root`."""
    plain = []
    for variable in variables:
        if keras.backend.is_float_dtype(variable.dtype) or variable.dtype in DTYPES:
            plain.append(variable.value)
        else:
            variable.assign(broadcast_value(variable.numpy(), f"keras_ddl/{plain_name(variable.path)}", root))
    if plain:
        ops.broadcast_variables(plain, root=root)


def collect_accumulated_gradients(accumulators: Sequence[keras.Variable], rank: int) -> None:
    """Moves the ranks' partly accumulated gradients to rank 0, where a checkpoint finds all of them.

    Only the sum over ranks means anything: it is what the next update reduces.
    """
    if accumulators:
        for variable, total in zip(accumulators, ops.all_reduce_n([v.value for v in accumulators], op="sum")):
            variable.assign(total if rank == 0 else tf.zeros_like(total))


def keep_accumulated_gradients_of_rank_0(accumulators: Sequence[keras.Variable], rank: int) -> None:
    """Clears the other ranks' accumulated gradients, after weights were restored; not collective."""
    if rank != 0:
        for variable in accumulators:
            variable.assign(tf.zeros_like(variable.value))


def global_logs(
    model: keras.Model,
    logs: Mapping[str, Any],
    rank: int,
    size: int,
    share: float,
    choose: Callable[[Any], Any],
) -> dict[str, Any]:
    """Returns a step's or epoch's logs over all ranks.

    Metrics are made from states reduced over ranks (means, counts and confusion matrices are sums, so this is exact),
    while each rank's own state stays as it is. A number of a custom train_step that is no metric's is weighed by the
    ranks' shares of the rows of the last step.

    Args:
        logs: what the last step returned on this rank; logs may hold logs.
        share: this rank's share of the rows of the last step.
        choose: Keras's rule, given the logs: the metrics' results if their keys are the logs' keys, else the logs.
    Cost: one all-reduce of 8 bytes per element of metric state.
    """
    local = _flat(model.get_metrics_result()) if model.metrics else {}
    flat_logs = _flat(logs)
    numbers = sorted(key for key, value in flat_logs.items() if _is_number(value))
    # A log entry that is a metric's result, under whatever name, is that metric's. Whether it is, is agreed too: on one
    # rank it might be equal by chance.
    pairs = [(key, name) for key in numbers for name in sorted(local, key=lambda name, key=key: name != key)]
    of_metrics = [float(_is_result(flat_logs[key], local[name])) for key, name in pairs]
    own = [float(flat_logs[key]) * share if share else 0.0 for key in numbers]
    extra = np.array([*own, *of_metrics])
    with metric_state.reduced(model.metrics, rank, size, name_of(model, "metrics"), extra) as total:
        results = _flat(model.get_metrics_result()) if model.metrics else {}
        chosen = choose(logs)
        # Values, not variables: a result may be the metric's own variable, which gets its state back.
        if set(_flat(chosen)) == set(results):
            return _packed(chosen, results)
    everyone = dict(zip(numbers, total[: len(numbers)]))
    votes = reversed(list(zip(pairs, total[len(numbers) :])))  # the metric of the entry's own name comes last and wins
    agreed = {key: name for (key, name), count in votes if count == size}
    return _packed(chosen, {key: results[agreed[key]] if key in agreed else everyone[key] for key in numbers})


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {key: value} of logs that may hold logs, by their innermost keys, as Keras shows them."""
    found = {}
    for key, value in logs.items():
        if isinstance(value, Mapping):
            found.update(_flat(value))
        else:
            found[key] = value if isinstance(value, str) else _array(value)
    return found


def _array(value: Any) -> Any:
    try:
        return np.array(value)
    except (TypeError, ValueError):
        return value


def _packed(logs: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs of the form of `logs`, with those values that are given."""
    return {
        key: _packed(value, values) if isinstance(value, Mapping) else values.get(key, value)
        for key, value in logs.items()
    }


def name_of(model: keras.Model, what: str) -> str:
    """Returns the name of a collective that concerns a model."""
    return f"keras_ddl/{plain_name(model.name)}/{what}"


def any_rank(flag: bool, name: str) -> bool:
    """Whether any rank says so."""
    return bool(communicator.all_reduce_array(np.array([flag], np.int32), op="max", name=name)[0])


def _is_number(value: Any) -> bool:
    return not isinstance(value, str) and np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)


def _is_result(value: Any, result: Any) -> bool:
    """Whether a log entry is the result of the metric of its name, rather than something a step computed itself."""
    return result is not None and np.array_equal(np.asarray(value), np.asarray(result), equal_nan=True)


def _describe(variable: keras.Variable) -> str:
    return f"{plain_name(variable.path)} {variable.dtype}[{'x'.join(map(str, variable.shape))}]"


def _digest(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value)).digest()
