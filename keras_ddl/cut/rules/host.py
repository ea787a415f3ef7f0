"""Rules for host functions and effects, which rank 0 runs once for all ranks, and for reads, which every rank runs.

On a mesh, rank 0 of all ranks runs them. The last cut sees to that; earlier cuts leave these operations unchanged
(Context.everyone).
"""

from __future__ import annotations

from keras_ddl.cut.analysis.placements import PlacedOutputs
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.analysis.side_effects import HOST_EFFECTS, HOST_FUNCTIONS, HOST_READS
from keras_ddl.cut.building import first_rank
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.registry import rule


def _effect(b: Context, node: Node) -> PlacedOutputs:
    """Only rank 0 prints and writes; operands are replicated."""
    inputs = b.all_replicated(node.inputs)
    if b.everyone is None or b.everyone.rank == 0:
        b.make(node, inputs)
    return []


def _function(b: Context, node: Node) -> PlacedOutputs:
    """All ranks get rank 0's results, because the program's function may do anything and must be called only once."""
    if b.everyone is None:
        return b.make_replicated(node)
    first_rank.check_sendable(
        b, node, "A host function in a step runs on rank 0", "Return numbers, or call it outside the step."
    )
    inputs = b.all_replicated(node.inputs)
    outputs = b.make(node, inputs) if b.everyone.rank == 0 else [None] * len(node.outputs)
    if outputs:
        b.report.from_rank_0(node, first_rank.messages(node.outputs))
    return first_rank.broadcast_outputs(b, node, outputs)


def _read(b: Context, node: Node) -> PlacedOutputs:
    """All ranks read, so that their data advances and ends together, and all get rank 0's results."""
    if b.everyone is None:
        return b.make_replicated(node)
    kind = "All ranks use what rank 0 reads from an iterator or a queue in a step"
    first_rank.check_sendable(b, node, kind, "Read it outside of the step, and pass it as an argument.")
    outputs = b.make(node, b.all_replicated(node.inputs))
    b.report.from_rank_0(node, first_rank.messages(node.outputs), "is read by each rank for itself")
    return first_rank.broadcast_outputs(b, node, outputs)


for each in (False, True):
    rule(*HOST_EFFECTS, of_replicated=each)(_effect)
    rule(*HOST_FUNCTIONS, of_replicated=each)(_function)
    rule(*HOST_READS, of_replicated=each)(_read)
