"""Finds operations whose side effects make a step unsafe to repeat: a failed step does not undo them."""

from __future__ import annotations

from collections.abc import Iterator

from keras_ddl.communicator.stack_position import user_line
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf

# What they change is neither a variable nor in the batch; beginnings of their types.
_ADVANCE = ("IteratorGetNext", "QueueDequeue", "QueueEnqueue", "LookupTableInsert", "LookupTableRemove",
            "LookupTableImport")  # fmt: skip


def draws_in_kernels(node: tf.compat.v1.NodeDef) -> bool:
    """Whether an operation keeps its random state in its kernel, which begins anew in another graph."""
    return "seed2" in node.attr


def not_repeatable(graph: tf.Graph) -> tuple[str, str] | None:
    """Returns the type of an operation that would do something different when it runs again, and the program's line;
    None if there is no such operation.
    """
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
