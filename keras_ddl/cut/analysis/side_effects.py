"""Operations that act on the host or outside of the process, and those that make a step unsafe to repeat."""

from __future__ import annotations

from collections.abc import Iterator

from keras_ddl.communicator.reporting.stack_position import user_line
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.program import PYTHON_FUNCTIONS

# Only rank 0 runs these, and sends the results to the other ranks.
HOST_FUNCTIONS = (*PYTHON_FUNCTIONS, "Timestamp", "NonDeterministicInts", "ReadFile", "MatchingFiles")
# Every rank reads its own iterator or queue, but uses the elements that rank 0 has read. Ranks cannot compare these
# objects.
HOST_READS = ("IteratorGetNext", "IteratorGetNextSync", "QueueDequeueV2", "QueueDequeueManyV2", "QueueDequeueUpToV2",
              "QueueSizeV2", "QueueIsClosedV2")  # fmt: skip
_SUMMARIES = ("", "Scalar", "Histogram", "Image", "Audio", "Graph", "RawProto")
HOST_EFFECTS = ("PrintV2", "WriteFile", "FlushSummaryWriter", *(f"Write{each}Summary" for each in _SUMMARIES))
# Resources that only these operations use need not be compared between ranks.
RESOURCE_OPERATIONS = (*HOST_READS, *HOST_EFFECTS, "QueueEnqueueV2", "QueueEnqueueManyV2", "QueueCloseV2")
# Prefixes of the types of operations that change state outside of variables and the batch.
_ADVANCE = ("IteratorGetNext", "QueueDequeue", "QueueEnqueue", "LookupTableInsert", "LookupTableRemove",
            "LookupTableImport")  # fmt: skip


def draws_in_kernels(node: tf.compat.v1.NodeDef) -> bool:
    """Whether an operation keeps its random state in its kernel, which starts again in another graph."""
    return "seed2" in node.attr


def not_repeatable(graph: tf.Graph) -> tuple[str, str] | None:
    """Returns the type and the program's line of an operation that would differ when it runs again, or None."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    kind = next((each.op for each in nodes if draws_in_kernels(each) or each.op.startswith(_ADVANCE)), None)
    if kind is None:
        return None
    made = next((each for each in _operations(graph) if each.type == kind), None)
    return kind, (user_line(made.traceback) or "") if made is not None else ""


def _operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    for each in graph.get_operations():
        yield each
        for inner in tf_compat.graphs_of(each):
            yield from _operations(inner)
