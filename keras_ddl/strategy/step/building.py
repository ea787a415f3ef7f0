"""Builds this rank's part of a traced step: cut along the batch, or on a mesh along the model axis first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from keras_ddl import cut
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.mesh.ranks import Mesh
from keras_ddl.strategy.shards import laid_out, layout_choice, sharded_slots, sharded_weights
from keras_ddl.strategy.shards.sharded_slots import sharded_variable_of_handle

Plan = Callable[[Sequence[int], Sequence[str]], list[list[int]]]


class Local(NamedTuple):
    """A rank's part of the arguments of a step, with placements.

    Attributes: batch: the batch whose rows are sharded.
    """

    tensors: Sequence[tf.Tensor]
    placements: Sequence[cut.Placement]
    batch: cut.Batch


class Axes(NamedTuple):
    """The collectives of a step on a mesh, over all ranks and along each axis."""

    everyone: cut.StepCollectives
    model: cut.StepCollectives
    data: cut.StepCollectives

    @classmethod
    def of(cls, job: Job, mesh: Mesh, scope: str, plan: Plan) -> Axes:
        everyone = cut.StepCollectives(scope, job.rank, job.size, plan)
        axes = (cut.StepCollectives(scope, each.rank, each.size, plan, comm=each) for each in (mesh.model, mesh.data))
        return cls(everyone, *axes)


def along_batch(
    job: Job,
    program: cut.Program,
    local: Local,
    collectives: cut.StepCollectives,
    snapshots: cut.Snapshots,
    options: Mapping[str, Any],
) -> list[tf.Tensor]:
    """Builds a step cut along the batch. Returns its complete outputs. options: as `cut.build_step` takes them."""
    slots = {id(outer): sharded_variable_of_handle(outer) for _, outer in program.captured}
    shares = {id(slot): slot.share for slot in slots.values() if slot is not None}
    mirrors = [_mirror(each) for each in shares.values() if each.mirror is not None]
    with tf.device(job.device):
        return cut.build_step(
            program,
            *local,
            collectives,
            batch_statistics=job.settings.batch_statistics,
            captured=lambda outer: outer if (slot := slots[id(outer)]) is None else slot.chunk.handle,
            snapshots=snapshots,
            shards=[outer for _, outer in program.captured if slots[id(outer)] is not None],
            weights=[o for _, o in program.captured if isinstance(slots[id(o)], sharded_weights.ShardedWeight)],
            gathered_bytes=job.gathered_bytes,
            mirrors=cut.Mirrors(mirrors, job.place_of(job.rank).batch.offset) if mirrors else None,
            **options,
        )


def on_mesh(
    job: Job,
    mesh: Mesh,
    step: str,
    program: cut.Program,
    local: Local,
    axes: Axes,
    snapshots: cut.Snapshots,
    options: Mapping[str, Any],
) -> tuple[list[tf.Tensor], tf.types.experimental.ConcreteFunction]:
    """Like `along_batch`, but also returns the first cut, along the model axis, which must live as long as the graph.

    Ranks of one model axis share rows, although each has read its own copy of the batch.
    """
    tensors, placements, batch = local
    outers = [outer for _, outer in program.captured]
    laid_out.refuse_made_outside(job, laid_out.made_outside(outers))
    mesh.layout.check_effects()
    if mesh.layout.is_to_choose:
        layout_choice.decide(mesh, program, placements, step, job.rank)
    if not options.get("inputs_are_whole"):
        tensors = [
            _with_static_rows(axes.model.gather(each, f"rows_{place}"), batch)
            if isinstance(placement, cut.Sharded)
            else each
            for place, (each, placement) in enumerate(zip(tensors, placements))
        ]
    data_layout = mesh.layout.data
    inputs = [each.tensor for each in program.inputs]
    input_axes = [] if data_layout is None else data_layout.axes_of_arguments(inputs, placements, mesh.model.size, step)
    # One data rank computes all rows of the batch.
    batch_placements = placements if mesh.data.size > 1 else [cut.REPLICATED] * len(placements)
    spread = [sharded_variable_of_handle(outer) for outer in outers] if job.goes_on else []
    mirrors = [_mirror(each.share) for each in spread if each is not None]
    place = job.place_of(job.rank)
    mirror_axis, offset = (axes.data, place.batch.offset) if mesh.data.size > 1 else (axes.model, place.model.offset)
    parts = [laid_out.local_part(each).tensor for each in options.get("parts", ())]
    chunk_of = chunks_of(outers)
    report, seed = options["report"], options["seed"]
    report.earlier = cut.Report(axis=f"model axis, {mesh.model.size} ranks")
    report.axis = f"batch axis, {mesh.data.size} rank{'' if mesh.data.size == 1 else 's'}"
    with tf.device(job.device):
        model_part = cut.cut_along_model(
            program,
            axes.model,
            laid_out.local_part,
            placements=placements,
            input_axes=input_axes,
            report=report.earlier,
            seed=seed,
        )
        rank_program = model_part.program()
        outputs = cut.build_step(
            rank_program,
            tensors,
            batch_placements,
            batch,
            axes.data,
            captured=lambda outer: outer if (chunk := chunk_of(outer)) is None else chunk,
            shards=[outer for _, outer in rank_program.captured if chunk_of(outer) is not None],
            snapshots=snapshots,
            earlier=axes.model,
            everyone=axes.everyone,
            mirrors=cut.Mirrors(mirrors, offset, mirror_axis) if mirrors else None,
            **{**options, "parts": parts},
        )
    return outputs, model_part.function


def chunks_of(outers: Sequence[tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor | None]:
    """Returns a function from a captured slice's handle to this rank's chunk's; None for slices that have no chunks."""
    chunks = {}
    for outer in outers:
        slot = sharded_variable_of_handle(outer)
        if slot is not None and not isinstance(slot.layout, cut.Slices):
            chunks[id(laid_out.local_part(outer).tensor)] = slot.chunk.handle
    return lambda outer: chunks.get(id(outer))


def mirrored_slices(outers: Sequence[tf.Tensor]) -> Callable[[tf.Tensor], bool]:
    """Returns a function that says whether a captured slice, given its handle, has a mirror."""
    slots = [(outer, sharded_variable_of_handle(outer)) for outer in outers]
    have_mirrors = [outer for outer, slot in slots if slot is not None and slot.share.mirror is not None]
    mirrored = {id(laid_out.local_part(outer).tensor) for outer in have_mirrors}
    return lambda outer: id(outer) in mirrored


def _mirror(share: sharded_slots.Share) -> cut.Mirror:
    mirror = None if share.mirror is None else share.mirror.handle
    layout = share.layout.flat if isinstance(share.layout, cut.MeshLayout) else share.layout  # along the mirrors' axis
    return cut.Mirror(share.chunk.handle, mirror, layout, share.chunk.dtype)


def _with_static_rows(tensor: tf.Tensor, batch: cut.Batch) -> tf.Tensor:
    """Returns a gathered argument with a static number of rows if the batch has one."""
    tensor.set_shape([batch.local if isinstance(batch.local, int) else None, *tensor.shape[1:]])
    return tensor
