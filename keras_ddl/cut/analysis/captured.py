"""Finds how a program uses the resources that it captures: variables, tables, iterators, queues."""

from __future__ import annotations

from collections.abc import Iterator

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.program import BRANCHES, LOOPS, Program, Return, Value


def uses(program: Program, value: Value) -> dict[tf.Operation, bool]:
    """Returns the operations that read a captured value, and whether each is in a branch or a loop.

    An operation that passes the value on in an unknown way counts as a reader.
    """
    found: dict[tf.Operation, bool] = {}
    for node in program.readers(value):
        if node.type == "Identity":
            found |= uses(program, node.outputs[0])
        elif not isinstance(node, Return):
            places = [place for place, each in enumerate(node.inputs) if each is value]
            found |= dict(each for place in places for each in _uses(node.operation, place, is_inside=False))
    return found


def _uses(operation: tf.Operation, index: int, is_inside: bool) -> Iterator[tuple[tf.Operation, bool]]:
    if operation.type == "Identity":
        yield from _readers(operation.outputs[0], is_inside)
        return
    place = index - 1 if operation.type in BRANCHES else index
    graphs = tf_compat.graphs_of(operation)
    is_known = operation.type in (*BRANCHES, *LOOPS, *tf_compat.CALLS) and place >= 0 and graphs
    if not is_known or any(each.consumers() for each in operation.outputs if each.dtype == tf.resource):
        yield operation, is_inside
        return
    for graph in graphs:
        yield from _readers(graph.inputs[place], is_inside or operation.type not in tf_compat.CALLS)


def _readers(tensor: tf.Tensor, is_inside: bool) -> Iterator[tuple[tf.Operation, bool]]:
    for reader in tensor.consumers():
        for index, each in enumerate(reader.inputs):
            if each is tensor or each.name == tensor.name:
                yield from _uses(reader, index, is_inside)
