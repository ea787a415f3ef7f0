"""Whether two processes have traced the same step: a digest of all that decides what it computes.

`Program.digest` names the collectives of a step, and is cheap. This one also has the attributes of operations, and the
graphs of branches, loops and calls, whatever the names that they have in a process.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable, Iterator, Mapping

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.attributes import FATES, AttrValue, Fate
from keras_ddl.cut.program import Node, Program

_digests: weakref.WeakKeyDictionary[Program, bytes] = weakref.WeakKeyDictionary()


def trace_digest(program: Program, places: Mapping[Hashable, int]) -> bytes:
    """Returns a digest that differs where traces do.

    places: of outer tensors that both processes number alike, by `ref`.
    Cost: that of reading all attributes, the first time.
    """
    if program not in _digests:
        _digests[program] = _digest(program)
    captured = [
        (places.get(outer.ref()), value.dtype.name, _variable_kind(value.tensor)) for value, outer in program.captured
    ]
    return hashlib.sha256(repr(captured).encode() + _digests[program]).digest()


def _variable_kind(handle: tf.Tensor) -> str:
    if handle.dtype != tf.resource:
        return ""
    return f"{tf_compat.variable_dtype(handle)} {tf_compat.variable_shape(handle)}"


def _digest(program: Program) -> bytes:
    places: dict[Node, int] = {value.node: -1 - place for place, value in enumerate(program.placeholders)}
    places.update((node, node.position) for node in program.nodes)
    digest = hashlib.sha256()
    for value in program.placeholders:
        digest.update(f"{value.dtype.name} {value.shape}\n".encode())
    for node in program.nodes:
        inputs = [(places[each.node], each.index) for each in node.inputs]
        outputs = [f"{each.dtype.name} {each.shape}" for each in node.outputs]
        described = (node.type, inputs, sorted(places[each] for each in node.after), outputs, node.device)
        digest.update(repr(described).encode())
        for text in _attributes(node):
            digest.update(text)
    ends = [(places[each.node], each.index) for each in program.outputs], [places[each] for each in program.effects]
    digest.update(repr(ends).encode())
    return digest.digest()


def _attributes(node: Node) -> Iterator[bytes]:
    """Yields what the attributes of an operation say; of strings that are constants nothing, since they name files."""
    if node.type == "Const" and node.outputs[0].dtype == tf.string:
        return
    definition = node.definition
    for name in sorted(definition.attr):
        if FATES.get(name) is not Fate.DROPPED:
            yield name.encode()
            yield from _value(node, definition.attr[name])


def _value(node: Node, attribute: AttrValue) -> Iterator[bytes]:
    functions = [each for each in (attribute.func, *attribute.list.func) if each.name]
    if not functions:
        yield attribute.SerializeToString(deterministic=True)
    for each in functions:
        graph = tf_compat.graph_of_function(node.operation, each)
        yield each.name.encode() if graph is None else _digest(Program(graph))
