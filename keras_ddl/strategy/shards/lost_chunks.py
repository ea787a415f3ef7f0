"""Redistributes slots when ranks are lost or join. A lost rank's chunks are in mirrors (cut/mirrors.py).

If another rank is lost meanwhile, the remaining ranks begin again. So a rank keeps its share until every rank has made
its next one, of the next generation. If some ranks have already switched to theirs, all others have made theirs and
switch, too.

A newcomer has the same slots without values: it sends nothing and gets a share like any other rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from keras_ddl import communicator, ops
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.flat_shards import Layout
from keras_ddl.errors import CollectiveError
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, all_slots

Places: TypeAlias = Sequence[tuple[int, int, int] | None]  # by rank: `Share.place`; None: of a newcomer

_NAME = "keras_ddl/slots/share_out"


def share_out(job: Job, *, is_new: bool = False) -> str | None:
    """Gives each rank of a job its share of every slot in shards. COLLECTIVE. All ranks have finished the same steps.

    Args:
        is_new: this rank is a newcomer, which has made no step yet.
    Returns: None; or, on every rank, a message that says what is lost because no rank has it, and nothing has changed.
    Raises: RankLostError: another rank was lost; call it again with the remaining ranks. CollectiveError, in a
        newcomer: it lacks slots that the others have.
    Cost: one all_gather of each slot, whose complete value is in memory until the next one's; and memory for the old
        and new shares of all slots together.
    """
    if job.shards_from_elements is None:
        return None
    slots = [each for each in all_slots() if isinstance(each.layout, Layout)]
    mine = {each.number: each.share.generation for each in slots}, is_new
    everyone = communicator.all_gather_object(mine, name=f"{_NAME}/generations")
    of_others = [generations for generations, is_new in everyone if not is_new]
    numbers = set.intersection(*map(set, of_others))
    if is_new and not numbers <= mine[0].keys():
        raise CollectiveError(
            "A rank that joins a running job must make the same optimizers as the other ranks. Received: optimizers "
            f"without {len(numbers - mine[0].keys())} of the variables that the other ranks keep in shards. Let fit "
            "build the optimizers, or call optimizer.build on all ranks."
        )
    newest = {number: max(each[number] for each in of_others) for number in numbers}
    of_all = [each for each in slots if each.number in numbers]
    for slot in of_all:
        slot.take_next_share(newest[slot.number])
    own = {each.number: each.share.place for each in of_all if each.share.generation == newest[each.number]}
    gathered = communicator.all_gather_object(own, name=f"{_NAME}/places")
    places = {number: [each.get(number) for each in gathered] for number in numbers}
    lost = next((each for each in of_all if _owners(places[each.number]) is None), None)
    if lost is not None:
        name = plain_name(lost.name)
        return (
            "Each shard is on two ranks, one of which must remain. Received: both ranks were lost together, and "
            f"with them a part of {name}."
        )
    next_places = [(rank, job.size, job.mirror_offset) for rank in range(job.size)]
    for slot in slots:
        if any(is_new for _, is_new in everyone):
            slot.assignments = (0, 0)  # newcomers have not made all of those
        if slot.number not in numbers:  # made in a step that not all ranks began: the others will make it
            slot.begin_anew(slot.initial(), job)
        elif places[slot.number] != next_places:
            value = _gathered(slot, places[slot.number], job.rank)
            slot.next_share = slot.share_of(value, job, newest[slot.number] + 1)
    communicator.barrier(name=f"{_NAME}/made")
    for slot in of_all:
        slot.take_next_share(newest[slot.number] + 1)
    return None


def _owners(places: Places) -> dict[int, int] | None:
    """Returns, for each chunk by its earlier rank, which present rank sends it; None: a chunk is lost."""
    rank_now = {each[0]: rank for rank, each in enumerate(places) if each is not None}
    _, size, offset = next(each for each in places if each is not None)
    owners: dict[int, int] = {}
    for chunk in range(size):
        owner = rank_now.get(chunk, rank_now.get((chunk + offset) % size))
        if owner is None:
            return None
        owners[chunk] = owner
    return owners


def _gathered(slot: ShardedVariable, places: Places, rank: int) -> tf.Tensor:
    """Returns the complete value, made of chunks and mirrors. COLLECTIVE. rank: of this process."""
    owners = _owners(places)
    assert owners is not None
    _, size, _ = next(each for each in places if each is not None)
    layout = Layout(tuple(slot.shape.as_list()), size)
    mine = [slot.stored_chunk(chunk) for chunk, owner in owners.items() if owner == rank]
    part = tf.concat(mine, axis=0) if mine else tf.zeros([0], slot.dtype)
    flat = ops.all_gather(part, name=f"{_NAME}/{slot.number}")
    order = [chunk for now in range(len(places)) for chunk, owner in owners.items() if owner == now]
    pieces = dict(zip(order, tf.split(flat, [layout.chunk(chunk)[1] for chunk in order])))
    return tf.reshape(tf.concat([pieces[chunk] for chunk in range(size)], axis=0), slot.shape)
