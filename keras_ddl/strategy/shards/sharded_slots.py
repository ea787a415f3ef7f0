"""Optimizer slots of large weights in shards: Strategy(sharding='optimizer').

A slot is a variable that an optimizer keeps for a weight, such as Adam's moments. When Keras creates a slot, its value
is replaced at once by a `ShardedVariable`. For Keras this is a variable of the weight's shape, but it has no memory of
its own. Beside it, this rank stores its chunk of the entries (cut/values/layouts.py) and, in a job that continues when
a rank is lost, the mirror of another rank's chunk (cut/shards/mirrors.py). A step that is traced on the global batch
reads and assigns the slot as usual, and the cut computes with the chunks. Any other read is refused unless the slot has
been gathered (gathered_slots.py), so nobody can read a wrong value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.context import Setting
from keras_ddl.compat.tensorflow import UninitializedVariable, tf
from keras_ddl.cut.values.layouts import Distribution, Layout, MeshLayout
from keras_ddl.errors import ConfigError
from keras_ddl.state.checksum import checksum
from keras_ddl.state.placements import NOTHING, MeshPlace, Place, holding
from keras_ddl.state.plan import Holding
from keras_ddl.strategy.calls import tracing
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.variables.first_values import FirstValue

_slots: weakref.WeakValueDictionary[int, ShardedVariable] = weakref.WeakValueDictionary()  # by id of the handle
# Whether one rank may restore slots for all; `gathered_slots.scatter_restored` sends them.
deferring_restored_values = Setting("deferring_slots", False)


class _Numbering:
    """Numbers slots in the order in which they are made."""

    def __init__(self) -> None:
        self.next = 0

    def take(self) -> int:
        self.next += 1
        return self.next - 1


_numbering = _Numbering()


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a slot, under one distribution of the slot over ranks.

    Attributes:
        layout: which rank has which entries.
        rank: the rank with this `chunk`.
        offset: distance to the mirror: rank r's chunk is also in the mirror of rank (r + offset) % layout.size; 0:
            there are no mirrors.
        chunk, mirror: variables; None if one rank has all entries, which are then in the slot itself.
        generation: how many redistributions preceded this one.
    """

    layout: Distribution
    rank: int
    offset: int
    chunk: Any
    mirror: Any
    generation: int = 0

    @property
    def place(self) -> Place:
        return Place(self.rank, self.layout.size, self.offset)

    @property
    def variables(self) -> list[Any]:
        """The chunk, and the mirror if there is one."""
        return [each for each in (self.chunk, self.mirror) if each is not None]

    def assign(self, value: tf.Tensor | FirstValue) -> None:
        """Stores this rank's share of a complete value, or of a value that has yet to be made."""
        for variable, part in zip(self.variables, self.place.parts()):
            self._assign(variable, value, part)

    def _assign(self, variable: Any, value: tf.Tensor | FirstValue, rank: int) -> None:
        if not isinstance(value, FirstValue):
            # TensorFlow slices the first axis without a copy: the variable would keep all of the complete value alive.
            variable.assign(tf.raw_ops.DeepCopy(x=self.layout.cut(value, rank)))
        elif isinstance(self.layout, MeshLayout) and not value.is_constant:
            batch, model = divmod(rank, self.layout.model)
            slice_ = value.share(self.layout.slices.runs(model), self.layout.flat.shape)
            variable.assign(tf.raw_ops.DeepCopy(x=self.layout.flat.cut(slice_, batch)))
        else:
            value.put(variable, self.layout.runs(rank))


class ShardedVariable(UninitializedVariable):
    """A variable whose entries are spread over the ranks, a chunk on each.

    While a job continues with one rank, that rank has all entries, and the variable is like any other (`is_complete`).

    Attributes:
        job: the job whose ranks share the entries.
        share: what this rank stores.
        next_share: what this rank will store as soon as every rank has its next share (state/generations.py).
        number: the number of this slot among those of the process. It is equal on all ranks, because they make slots in
            the same order.
        initial: returns the first value, equal on all ranks; None: the value cannot be made again.
        gathered: all entries, while they can be read (gathered_slots.py).
        restored: inside `deferring_restored_values`, the value that this rank has restored for all ranks.
        is_without_values: whether a graph is being traced to be served elsewhere, so that reads are allowed although
            they return no values.
        assignments: the number of assignments outside of steps, and a checksum of the last one; ranks compare them.
        axis: the axis that a layout cuts along the model axis; None: a layout cuts none.
    """

    axis: int | None = None

    def __init__(
        self,
        value: tf.Tensor | FirstValue,
        name: str,
        job: Job,
        initial: Callable[[], tf.Tensor | FirstValue] | None,
        *,
        is_trained: bool = False,
    ) -> None:
        super().__init__(trainable=is_trained, shape=value.shape, dtype=value.dtype, name=name)
        self.number, self.initial, self.job = _numbering.take(), initial, job
        self.is_complete = False
        self.next_share: Share | None = None
        self.begin_anew(value, job)
        self.gathered: tf.Tensor | None = None
        self.restored: tf.Tensor | None = None
        self.is_without_values = False
        self.assignments = (0, 0)
        _slots[id(self.handle)] = self

    @property
    def layout(self) -> Any:
        return self.share.layout

    @property
    def chunk(self) -> Any:
        """This rank's entries, a tf.Variable."""
        return self.share.chunk

    def begin_anew(self, value: tf.Tensor | FirstValue, job: Job) -> None:
        """Stores this rank's share of a complete value, as for a new slot."""
        self._store(self.share_of(value, job))

    def share_of(self, value: tf.Tensor | FirstValue, job: Job) -> Share:
        """Returns what this rank stores of a complete value, given the job's present ranks."""
        with tf.device(job.device):
            layout, place = self.shared_at(job.place_of(job.rank))
            share = self._share(layout, place, [self._part(layout.shape_of(part)) for part in place.parts()])
            share.assign(value)
        return share

    def shared_at(self, place: MeshPlace) -> tuple[Distribution, Place]:
        """Returns how ranks share the variable, and which part the rank at a place has.

        In this class, the ranks of the batch axis share it. On a mesh, ranks at other positions of the model axis hold
        the same parts, so no mirrors are needed.
        """
        own = place.batch if place.model.size == 1 else place.batch._replace(offset=0)
        return Layout(tuple(self.shape.as_list()), own.size), own

    @staticmethod
    def _share(layout: Distribution, place: Place, stored: Sequence[Any], generation: int = 0) -> Share:
        chunk, mirror = [*stored, None][:2]
        return Share(layout, place.number, place.offset, chunk, mirror, generation)

    def _part(self, shape: Sequence[int], value: np.ndarray | None = None) -> Any:
        # Also an UninitializedVariable, because creating one does not involve a Strategy's scope.
        name = self.name.partition(":")[0]
        part = UninitializedVariable(trainable=False, shape=shape, dtype=self.dtype, name=name)
        if value is not None:
            part.assign(value.reshape(shape))
        return part

    def complete(self) -> None:
        """Gives the variable its first value, if it has none."""

    # ---- a leaf of the state that ranks redistribute (state/generations.py)

    @property
    def can_begin_anew(self) -> bool:
        return self.initial is not None

    @property
    def full_shape(self) -> tuple[int, ...]:
        return tuple(self.shape.as_list())

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype.as_numpy_dtype)

    def held(self) -> Holding:
        return holding(self.layout, self.share.place)

    def held_by_all(self) -> tuple[Holding, ...]:
        """Returns each rank's holding. Ranks with the same model position hold the same slices."""
        return tuple(self.wanted(self.job.place_of(rank)) for rank in range(self.job.size))

    def values(self) -> list[np.ndarray]:
        return [np.asarray(each.read_value()) for each in ([self] if self.is_complete else self.share.variables)]

    def restore(self, arrays: Sequence[np.ndarray]) -> None:
        for variable, array in zip(self.share.variables, arrays, strict=True):
            variable.assign(array.reshape(variable.shape))

    def wanted(self, place: MeshPlace | None) -> Holding:
        return NOTHING if place is None else holding(*self.shared_at(place))

    def make_next(self, place: MeshPlace, arrays: Sequence[np.ndarray | int], generation: int) -> None:
        self.next_share = None
        layout, own = self.shared_at(place)
        if self.is_complete and layout.size == 1 and isinstance(arrays[0], int):
            return
        before = self.share.variables
        with tf.device(self.job.device):
            stored = []
            for part, each in zip(own.parts(), arrays):
                shape = layout.shape_of(part)
                if isinstance(each, int) and not self.is_complete and before[each].shape == shape:
                    stored.append(before[each])
                else:
                    stored.append(self._part(shape, self.values()[each] if isinstance(each, int) else each))
        self.next_share = self._share(layout, own, stored, generation)

    def take_next(self) -> None:
        if self.next_share is not None:
            share, self.next_share = self.next_share, None
            self._store(share)

    def forget_assignments(self) -> None:
        self.assignments = (0, 0)

    def _store(self, share: Share) -> None:
        if share.layout.size == 1:
            self.is_complete = True
            # Unlike `assign`, works whatever shape the handle has while entries are in chunks.
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.reshape(share.chunk, self.shape))
            share = replace(share, chunk=None, mirror=None)
        elif self.is_complete:
            self.is_complete = False
            nothing = tf.zeros([0], self.dtype)  # frees the memory of all entries
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=nothing)
        self.share = share

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        return tf.constant(True)

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        if self.is_complete or self.is_without_values or _in_traced_step():
            return super()._read_variable_op(*args, **kwargs)
        return self._read_gathered("a read")

    def _read_gathered(self, what: str) -> tf.Tensor:
        if self.gathered is None or not tf.executing_eagerly():
            raise self._refusal(what)
        return self.gathered

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_complete or _in_traced_step():
            return super().assign(value, *args, **kwargs)
        if not tf.executing_eagerly():
            raise self._refusal("an assignment")
        value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        self.share.assign(value)
        if deferring_restored_values.get():
            self.restored = value
        else:
            self.note_assignment(value.numpy())
        if self.gathered is not None:
            self.gathered = value
        return self

    def note_assignment(self, content: np.ndarray) -> None:
        """Counts an assignment outside of steps. `content`: describes the value, equally on all ranks."""
        self.assignments = (self.assignments[0] + 1, checksum(content))

    def note_restored(self, source: str) -> None:
        """Counts an assignment of a value that was restored from `source`, equally on all ranks."""
        self.note_assignment(np.frombuffer(source.encode(), np.uint8))

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_complete or _in_traced_step():
            return super().assign_add(delta, *args, **kwargs)
        return self.assign(self._read_gathered("assign_add") + delta)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_complete or _in_traced_step():
            return super().assign_sub(delta, *args, **kwargs)
        return self.assign(self._read_gathered("assign_sub") - delta)

    def _refusal(self, what: str) -> ConfigError:
        where = "in strategy.run" if keras_compat.replica_strategy() is not None else "outside of such a step"
        return ConfigError(
            "A variable that an optimizer keeps in shards, with Strategy(sharding='optimizer'), can be used only "
            f"inside steps of fit and strategy.function, and not with run_eagerly=True. Received: {what} of "
            f"{self.name} {where} (rank {self.share.rank}). Read or save it inside `with "
            "strategy.whole_optimizer(model):`, on all ranks; or save with keras_ddl.callbacks.Checkpoint; or make the "
            "Strategy without sharding."
        )

    def __repr__(self) -> str:
        size = self.layout.size
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name}, part {self.share.rank} "
            f"of {size}>"
        )

    __str__ = __repr__


def _in_traced_step() -> bool:
    # A step that is traced to be cut never runs as it is, so the missing entries do no harm.
    return tracing.tracing_for.get() is not None and not tf.executing_eagerly()


def sharded_variable(variable: Any) -> ShardedVariable | None:
    """Returns the ShardedVariable that a keras.Variable or tf.Variable has or is; None if it is not in shards."""
    slot = slot_of(variable)
    return slot if slot is not None and not slot.is_complete else None


def whole(variables: Iterable[Any]) -> list[Any]:
    """Returns the variables that this rank has in full."""
    return [each for each in variables if sharded_variable(each) is None]


def sharded_variable_of_handle(handle: Any) -> ShardedVariable | None:
    """Returns the ShardedVariable with this resource handle; None for all other tensors."""
    slot = slot_of_handle(handle)
    return slot if slot is not None and not slot.is_complete else None


def slot_of_handle(handle: Any) -> ShardedVariable | None:
    """Like `sharded_variable_of_handle`, even while the rank has all entries."""
    slot = _slots.get(id(handle))
    return slot if slot is not None and slot.handle is handle else None


def chunk_of_handle(handle: Any) -> tf.Tensor | None:
    """Returns the handle of this rank's chunk of the ShardedVariable with this handle; None for all other tensors."""
    slot = sharded_variable_of_handle(handle)
    return None if slot is None else slot.chunk.handle


def slot_of(variable: Any) -> ShardedVariable | None:
    """Like `sharded_variable`, even while one rank has all entries."""
    inner = variable if isinstance(variable, ShardedVariable) else models.inner_variable(variable)
    return inner if isinstance(inner, ShardedVariable) else None


def all_slots() -> list[ShardedVariable]:
    """Returns, in the order of creation, this process's slots in shards, even while one rank has all entries."""
    return sorted(_slots.values(), key=lambda each: each.number)


def numbers_in(variables: Iterable[Any]) -> tuple[list[int | None], int]:
    """Returns a number for each slot and None for each other variable, and the number of the next new slot."""
    slots = map(slot_of, variables)
    return [None if each is None else each.number for each in slots], _numbering.next


def number_as(variables: Sequence[Any], numbers: tuple[Sequence[int | None], int]) -> bool:
    """Numbers slots in a newcomer as `numbers_in` returned on another rank.

    Returns False if the newcomer has other slots.
    """
    slots = list(map(slot_of, variables))
    of_others, _numbering.next = numbers
    places = [[place for place, each in enumerate(some) if each is not None] for some in (slots, of_others)]
    if places[0] != places[1]:
        return False
    for slot, number in zip(slots, of_others):
        if slot is not None and number is not None:
            slot.number = number
    return True


def local_variables(variable: Any) -> list[Any]:
    """Returns the variables in which this rank stores `variable`: its chunk and a mirror, or the complete variable."""
    slot = sharded_variable(variable)
    return [variable] if slot is None else slot.share.variables


def is_large(job: Job, shape: tuple[int, ...]) -> bool:
    """Whether variables of this shape are large enough to be in shards."""
    return job.shards_from_elements is not None and int(np.prod(shape)) >= job.shards_from_elements
