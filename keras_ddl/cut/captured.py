"""What a program does with the resources that it captures: variables, tables, iterators, queues."""

from __future__ import annotations

from collections.abc import Iterator

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.program import BRANCHES, LOOPS, Program, Return, Value


def uses(program: Program, value: Value) -> dict[tf.Operation, bool]:
    """Returns the operations that read a captured value, and whether each is in a branch or a loop. An operation that
    hands it on in a way that is not known is one itself.
    """
    readers = [node for node in program.readers(value) if not isinstance(node, Return)]
    places = [(node, i) for node in readers for i, one in enumerate(node.inputs) if one is value]
    return dict(found for node, i in places for found in _uses(node.operation, i, is_inside=False))


def _uses(operation: tf.Operation, index: int, is_inside: bool) -> Iterator[tuple[tf.Operation, bool]]:
    if operation.type == "Identity":
        yield from _readers(operation.outputs[0], is_inside)
        return
    place = index - 1 if operation.type in BRANCHES else index
    graphs = tf_compat.graphs_of(operation)
    if place < 0 or not graphs or operation.type not in (*BRANCHES, *LOOPS, *tf_compat.CALLS):
        yield operation, is_inside
        return
    for graph in graphs:
        yield from _readers(graph.inputs[place], is_inside or operation.type not in tf_compat.CALLS)


def _readers(tensor: tf.Tensor, is_inside: bool) -> Iterator[tuple[tf.Operation, bool]]:
    for reader in tensor.consumers():
        for index, each in enumerate(reader.inputs):
            if each is tensor or each.name == tensor.name:
                yield from _uses(reader, index, is_inside)
