"""Shares slots out anew among the ranks that are left: what a lost rank had is in mirrors (cut/mirrors.py).

Another rank may be lost meanwhile, and those that are left begin again. So a rank keeps its share until every rank has
made its next one. If some have taken theirs by then, the others have made their own, and take it as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_ddl import communicator, ops
from keras_ddl.compat import models
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, all_in_shards


def share_out(job: Job) -> str | None:
    """Gives each rank of a job its share of every slot in shards. COLLECTIVE. All ranks have finished the same steps.

    Returns: None; or, on every rank, what is lost because no rank has it: then nothing has changed.
    Raises: RankLostError: another rank was lost; to be called again with those that are left.
    Cost: one all_gather of each slot, whose complete value is in memory until the next; and of all slots the share from
        before beside the next one.
    """
    if job.shards_from_elements is None:
        return None
    slots = all_in_shards()
    shares = communicator.all_gather_object({each.number: each.shares for each in slots}, name=f"{_NAME}/shares")
    numbers = set.intersection(*map(set, shares))
    of_all = [each for each in slots if each.number in numbers]
    for slot in of_all:
        if slot.shares < max(some[slot.number] for some in shares):
            slot.take_next_share()
    ranks = communicator.all_gather_object({each.number: each.share.rank for each in of_all}, name=f"{_NAME}/ranks")
    left = {each.number: [some[each.number] for some in ranks] for each in of_all}
    lost = next((each for each in of_all if _owners(each, left[each.number]) is None), None)
    if lost is not None:
        name = models.plain_name(lost.name)
        return (
            "Shards of optimizers are on two ranks each. Received: a rank and the one with its mirrors were lost "
            f"together, and with them a part of {name}."
        )
    for slot in slots:
        if slot.number not in numbers:  # made in a step that not all ranks began: the others will make it
            slot.next_share = slot.share_of(slot.initial(), job)
        elif left[slot.number] != list(range(slot.layout.size)) or slot.share.offset != job.mirror_offset:
            slot.next_share = slot.share_of(_gathered(slot, left[slot.number]), job)
    communicator.barrier(name=f"{_NAME}/made")
    for slot in slots:
        slot.take_next_share()
    return None


_NAME = "keras_ddl/slots/share_out"


def _owners(slot: ShardedVariable, left: Sequence[int]) -> dict[int, int] | None:
    """Returns which of the ranks that are `left`, by their ranks of before, gives each chunk; None: one is lost."""
    size, offset = slot.layout.size, slot.share.offset
    owners = {rank: rank if rank in left else (rank + offset) % size for rank in range(size)}
    return owners if set(owners.values()) <= set(left) else None


def _gathered(slot: ShardedVariable, left: Sequence[int]) -> tf.Tensor:
    """Returns the complete value, of chunks and mirrors."""
    owners, share = _owners(slot, left), slot.share
    assert owners is not None
    given = {each: [rank for rank, owner in owners.items() if owner == each] for each in left}
    mine = [share.chunk if rank == share.rank else share.mirror for rank in given[share.rank]]
    flat = ops.all_gather(tf.concat([each.read_value() for each in mine], axis=0), name=f"{_NAME}/{slot.number}")
    order = [rank for each in left for rank in given[each]]
    pieces = dict(zip(order, tf.split(flat, [slot.layout.chunk(rank)[1] for rank in order])))
    return tf.reshape(tf.concat([pieces[rank] for rank in range(slot.layout.size)], axis=0), slot.shape)
