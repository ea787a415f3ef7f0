"""Compares the ranks' variables by checksums. Each variable is read once, at the speed of memory.

If a layout cuts a variable along the model axis, the ranks that have the same slice compare it. A chunk of a variable
in shards is on one rank only, so ranks compare which values the program has assigned to the variable instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat import models
from keras_ddl.compat.keras import keras
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import as_array, tf
from keras_ddl.state.checksum import checksum
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards import laid_out, sharded_slots


class Digests(NamedTuple):
    """Digests of the state that all ranks have, of this rank's slices, and of assignments to divided variables."""

    common: int
    slices: int
    assigned: int


class Compared:
    """The checksums of this rank's variables."""

    def __init__(self, variables: Iterable[Any], job: Job) -> None:
        self.variables: list[Any] = []
        self.sums: list[int] = []
        self._parts: list[sharded_slots.ShardedVariable] = []
        self._job = job
        self.add(variables)

    def add(self, variables: Iterable[Any]) -> None:
        """Adds the variables that are not compared yet."""
        known = {id(tf_variable(each)) for each in self.variables}
        numeric = {id(tf_variable(each)): each for each in variables if _has_numbers(each)}
        found = [each for key, each in numeric.items() if key not in known]
        compared = [each for each in found if is_compared(each)]
        self.variables += compared
        self.sums += [checksum(values(each)) for each in compared]
        self._parts += [part for each in found if (part := sharded_slots.sharded_variable(each)) is not None]

    def digests(self) -> Digests:
        """Returns the digests that ranks exchange."""
        is_slice = [laid_out.slice_of(each) is not None for each in self.variables]
        common, slices = ([s for s, cut in zip(self.sums, is_slice) if cut is wanted] for wanted in (False, True))
        assigned = [number for each in self._parts for number in each.assignments]
        return Digests(*map(digest_of_numbers, (common, slices, assigned)))

    def checksums(self) -> dict[str, int]:
        """Returns name -> checksum of variables that all ranks have, and of values assigned to other variables."""
        equal = [(each, own) for each, own in zip(self.variables, self.sums) if laid_out.slice_of(each) is None]
        assigned = [(each, hash(each.assignments)) for each in self._parts]
        sums: dict[str, int] = {}
        for number, (variable, own) in enumerate([*equal, *assigned]):
            name = name_of(variable)
            sums[name if name not in sums else f"{name} ({number})"] = own
        return sums

    @property
    def has_parts(self) -> bool:
        """Whether a rank lacks some values of these variables."""
        return bool(self._parts)

    def differing(self, name: str) -> tuple[list[list[tuple[str, int]]], list[tuple[int, range]]]:
        """Returns each rank's pairs (name, checksum), and pairs (number of a variable, ranks on which it differs).

        COLLECTIVE. name: the name of the collective.
        """
        named = [(name_of(each), number) for each, number in zip(self.variables, self.sums)]
        gathered = communicator.all_gather_object(named, name=name)
        where = [
            (number, ranks)
            for number, variable in enumerate(self.variables)
            for ranks in self._ranks_with(variable)
            if len({tuple(gathered[rank][number : number + 1]) for rank in ranks}) > 1
        ]
        return gathered, where

    def _ranks_with(self, variable: Any) -> list[range]:
        """Returns, for each slice of a variable, the ranks that have it; for an uncut variable, all ranks."""
        apart = ranks_apart(self._job) if laid_out.slice_of(variable) is not None else 1
        return [range(first, self._job.size, apart) for first in range(apart)]


def name_of(variable: Any) -> str:
    """Returns the name of a variable of Keras or TensorFlow, the same on all ranks."""
    return plain_name(getattr(variable, "path", None) or variable.name)


def tf_variable(variable: Any) -> Any:
    """Returns the tf.Variable of a variable of Keras or TensorFlow."""
    return models.inner_variable(variable) if isinstance(variable, keras.Variable) else variable


def differ(digests: Sequence[Digests], job: Job) -> bool:
    """Whether ranks differ in values that all ranks have, or in a slice that several ranks have.

    digests: the digests of each rank, in order.
    """
    apart = ranks_apart(job)
    slices = [[each.slices for each in digests][rank::apart] for rank in range(apart)]
    common, assigned = ([getattr(each, part) for each in digests] for part in ("common", "assigned"))
    return any(len(set(each)) > 1 for each in (common, assigned, *slices))


def ranks_apart(job: Job) -> int:
    """Returns the distance between ranks that have the same slices."""
    return 1 if job.mesh is None else job.mesh.model.size


def values(variable: Any) -> np.ndarray:
    """Returns this rank's part of a variable, for the comparison."""
    own = laid_out.slice_of(variable)
    return as_array(tf.convert_to_tensor(variable if own is None else own))


def is_compared(variable: Any) -> bool:
    """Whether other ranks have the same part of a variable."""
    return sharded_slots.sharded_variable(variable) is None or laid_out.slice_of(variable) is not None


def _has_numbers(variable: Any) -> bool:
    if tf_variable(variable) is None:  # not created yet
        return False
    return bool(tf.as_dtype(variable.dtype) not in (tf.string, tf.resource, tf.variant))


def digest_of_numbers(numbers: Sequence[int]) -> int:
    """Returns 64 bits of a digest of numbers below 2**64.

    The digest is not a CRC, because the checksums are CRCs, and the CRC of data followed by its own CRC is a constant.
    """
    data = np.array(numbers, np.uint64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
