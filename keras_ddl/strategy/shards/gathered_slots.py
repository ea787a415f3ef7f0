"""Gathers slots in shards (sharded_slots.py) so that they can be read and saved, and scatters restored values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator.comparison import other_rank
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat import models
from keras_ddl.compat.context import Setting
from keras_ddl.compat.keras import keras
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, DriftError
from keras_ddl.state.exchange import exchange, gather
from keras_ddl.state.placements import NOTHING, replicated
from keras_ddl.state.plan import plan
from keras_ddl.strategy.shards import sharded_slots
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable

inference = Setting("inference", False)  # allows a step while slots are gathered, because it changes none
# The open contexts of `gathered`, equal on all ranks: their slots, and the rank that can read them (None: all ranks).
_gathered: list[tuple[Sequence[ShardedVariable], int | None]] = []


def slots_in(variables: Iterable[Any]) -> list[ShardedVariable]:
    """Returns the slots in shards among variables, in order, even while one rank has all their entries."""
    return [each for each in map(sharded_slots.slot_of, variables) if each is not None]


def spread_in(variables: Iterable[Any]) -> list[ShardedVariable]:
    """Returns the variables that are slots in shards without all entries on any rank. Equal on all ranks."""
    return [each for each in slots_in(variables) if not each.is_complete]


def slots_of(owner: Any) -> list[ShardedVariable]:
    """Returns the slots in shards of an optimizer, or of a model's optimizers with the variables that a layout cuts."""
    is_one = isinstance(owner, keras.optimizers.Optimizer)
    variables = [v for each in ([owner] if is_one else models.optimizers_of(owner)) for v in each.variables]
    variables += [] if is_one else owner.variables
    return slots_in({id(each): each for each in variables}.values())


@contextlib.contextmanager
def gathered(slots: Sequence[ShardedVariable], *, on_rank: int | None = None) -> Iterator[None]:
    """Makes complete slots readable within the block, on every rank or on one. COLLECTIVE on entry.

    Cost: one exchange of each slot; memory for all of them on ranks that can read them.
    """
    before = [each.gathered for each in slots]
    _gathered.append((slots, on_rank))
    try:
        for each in slots:
            value = _gather(each, on_rank)
            if on_rank in (None, communicator.rank()):
                each.gathered = value
            del value  # frees the memory on other ranks
        yield
    finally:
        _gathered.pop()
        for each, values in zip(slots, before):
            if values is None:  # else the outer context still reads it, with later assignments
                each.gathered = None


def require_same_assignments(slots: Sequence[ShardedVariable]) -> None:
    """Checks, before slots are gathered, that all ranks have assigned them the same values outside of steps.

    Otherwise the chunks would not belong together. COLLECTIVE if there are slots.

    Raises: DriftError, on every rank.
    Cost: one exchange of a few bytes per slot.
    """
    if not slots:
        return
    gathered = communicator.all_gather_object([each.assignments for each in slots], name="keras_ddl/slots/compared")
    other = other_rank(gathered)
    if other is not None:
        first = next(slot for slot, one, theirs in zip(slots, gathered[0], gathered[other]) if one != theirs)
        raise DriftError(
            "Outside of steps, variables that are spread over the ranks must be changed in the same way on every rank. "
            f"Received: assignments to {plain_name(first.name)} on rank {other} that differ from rank 0's (rank "
            f"{communicator.rank()}). Run the code that sets these variables on all ranks."
        )


def are_readable_everywhere(slots: Iterable[ShardedVariable]) -> bool:
    """Whether these slots are gathered on all ranks; equal on all ranks."""
    everywhere = {id(each) for some, on_rank in _gathered if on_rank is None for each in some}
    return all(id(each) in everywhere for each in slots)


def gather_again(slot: ShardedVariable) -> None:
    """If a slot is gathered, makes new values readable after ranks have set its chunks. COLLECTIVE in that case."""
    if any(each is slot for some, _ in _gathered for each in some):
        value = _gather(slot)
        if slot.gathered is not None:
            slot.gathered = value


@contextlib.contextmanager
def without_values(slots: Sequence[ShardedVariable]) -> Iterator[None]:
    """Lets the block trace and save a graph that reads these slots without their values, to be served elsewhere."""
    for each in slots:
        each.is_without_values = True
    try:
        yield
    finally:
        for each in slots:
            each.is_without_values = False


def _gather(slot: ShardedVariable, on_rank: int | None = None) -> tf.Tensor | None:
    """Returns all of a slot; None on ranks other than `on_rank`, unless one rank is left. COLLECTIVE."""
    name = _name(slot, "gathered")

    def make() -> tf.Tensor | None:
        slot.complete()
        if slot.is_complete:
            return slot.read_value()
        held, place = slot.held_by_all(), communicator.topology()
        with ops.translate_errors():
            value = gather(
                held, slot.full_shape, place.hosts, place.rank, slot.values, slot.numpy_dtype, name, on_rank=on_rank
            )
        return None if value is None else tf.constant(value)

    return history.recorded(name, lambda: communicator.as_one_each(make, f"{name}/all"))


def check_not_gathered(step: str, slots: Callable[[], Sequence[ShardedVariable]]) -> None:
    """Raises ConfigError, on every rank, if some of these slots are gathered, because the step would change them."""
    if (
        any(some for some, _ in _gathered)
        and not inference.get()
        and {id(each) for some, _ in _gathered for each in some} & {id(each) for each in slots()}
    ):
        raise ConfigError(
            "A step that may change optimizer variables in shards must not run inside `with "
            "strategy.whole_optimizer(...)`, nor in a callback while fit saves: the gathered values would become "
            f"stale. Received: {step} (rank {communicator.rank()}). Run the step before or after."
        )


def scatter_restored(slots: Sequence[ShardedVariable], root: int = 0) -> None:
    """Gives all ranks their chunks of the values that rank `root` has restored. COLLECTIVE if there are slots.

    Raises: ConfigError, on every rank: slots were assigned on some ranks only, or with different values, so the other
        ranks' chunks are unknown.
    """
    if slots:
        history.left_to_join(lambda: _forget_restored(slots), lambda: _scatter_restored(slots, root))


def _forget_restored(slots: Sequence[ShardedVariable]) -> None:
    for each in slots:
        each.restored = None


def _scatter_restored(slots: Sequence[ShardedVariable], root: int) -> None:
    mine = ([each.assignments for each in slots], [each.restored is not None for each in slots])
    everyone = communicator.all_gather_object(mine, name="keras_ddl/slots/assigned")
    differs = other_rank([assignments for assignments, _ in everyone])
    if differs is not None:
        raise ConfigError(
            "Outside of steps, optimizer variables in shards must be assigned the same values on all ranks, because "
            f"each rank keeps its own chunk of them. Received: assignments on rank {differs} that differ from rank 0's "
            f"(rank {communicator.rank()}). Restore or assign the variables on every rank, or resume with "
            "keras_ddl.callbacks.Checkpoint."
        )
    for each, is_restored in zip(slots, everyone[root][1]):
        if is_restored:
            _spread(each, root)
    _forget_restored(slots)


def _spread(slot: ShardedVariable, root: int) -> None:
    """Gives each rank its parts of the value that rank `root` has restored. COLLECTIVE."""
    name, restored = _name(slot, "spread"), [np.asarray(slot.restored)]

    def spread() -> None:
        wanted, place, shape = slot.held_by_all(), communicator.topology(), slot.full_shape
        held = tuple(replicated(shape) if rank == root else NOTHING for rank in range(len(wanted)))
        moves = plan(held, wanted, place.hosts)
        arrays = exchange(moves, held, wanted, place.rank, lambda: restored, slot.numpy_dtype, name)
        for variable, array in zip(slot.share.variables, arrays):
            variable.assign((restored[array] if isinstance(array, int) else array).reshape(variable.shape))

    communicator.as_one_each(spread, f"{name}/all")


def _name(slot: ShardedVariable, collective: str) -> str:
    own = slot.name.partition(":")[0].rpartition("/")[2]  # without the scopes in which the optimizer was built
    return f"keras_ddl/slots/{plain_name(own)}/{collective}"
