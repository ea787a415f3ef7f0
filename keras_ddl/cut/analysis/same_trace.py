"""Computes a digest of a traced step, which shows whether two processes have traced the same step.

The digest covers everything that determines the results except the inputs: every operation with its attributes,
constants, and the graphs of branches, loops and calls, but not the names that these have in a process. It is also part
of the names of a step's collectives, so ranks that traced different steps do not match.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.attributes import FATES, AttrValue, Fate, device_of_made
from keras_ddl.cut.analysis.program import Node, Program, Return, Value
from keras_ddl.cut.analysis.report import line_of
from keras_ddl.cut.analysis.side_effects import HOST_EFFECTS, HOST_FUNCTIONS

# Attributes that name an object of one process. The object itself is compared, or belongs to rank 0 alone.
_NAMES = ("container", "shared_name", "token", "tensor_array_name", "stack_name", "metadata", "message")
# The devices and threads with which a process runs a called function.
_MEANS = ("config_proto",)
_NOT_COMPARED = {*_NAMES, *_MEANS, *(name for name, fate in FATES.items() if fate is Fate.DROPPED)}
# Readers of strings whose results do not depend on them: they run on rank 0 alone, or only report an error.
_WITHOUT_RESULT = (*HOST_EFFECTS, *HOST_FUNCTIONS, "Assert", "SaveV2", "MergeV2Checkpoints")
_SHOWN = 4  # values of a constant, and attributes of an operation, in a message
_digests: weakref.WeakKeyDictionary[tf.Graph, bytes] = weakref.WeakKeyDictionary()


class Part(NamedTuple):
    """An argument, an operation or a result of a program, without the names that it has in a process.

    Attributes:
        content: bytes that differ if another process has traced something else.
        node: None for arguments and results, which `text` describes.
    """

    content: bytes
    node: Node | None
    text: str = ""

    def __str__(self) -> str:
        return self.text or _words(self.node)


def trace_digest(program: Program) -> bytes:
    """Returns a digest that differs if traces differ. Cost: the first call for a graph reads all attributes."""
    if program.graph not in _digests:
        digest = hashlib.sha256()
        for part in trace_parts(program):
            digest.update(part.content)
        _digests[program.graph] = digest.digest()
    return _digests[program.graph]


def trace_parts(program: Program) -> Iterator[Part]:
    """Yields the parts of a program, in the same order in all processes. Parts of a function come before its caller."""
    places: dict[Node, int] = {value.node: -1 - place for place, value in enumerate(program.placeholders)}
    places.update((node, node.position) for node in program.nodes)
    for place, value in enumerate(program.placeholders):
        kind = f"{value.dtype.name}{value.shape}"
        yield Part(f"input {kind}\n".encode(), None, f"input {place}, {kind}")
    for node in program.nodes:
        inputs = [(places[each.node], each.index) for each in node.inputs]
        outputs = [f"{each.dtype.name} {each.shape}" for each in node.outputs]
        device = device_of_made(node.device)
        described = repr((node.type, inputs, sorted(places[each] for each in node.after), outputs, device)).encode()
        if not _is_free(node, program):
            for each in _attributes(node):
                if isinstance(each, bytes):
                    described += each
                else:
                    yield from trace_parts(each)
        yield Part(described + b"\n", node)
    ends = [(places[each.node], each.index) for each in program.outputs], [places[each] for each in program.effects]
    yield Part(repr(ends).encode(), None, "what the step returns and writes")


def _is_free(node: Node, program: Program) -> bool:
    """Whether a node only makes strings on which no result depends, such as file names, which may differ by rank."""
    is_text = node.is_pure and bool(node.outputs) and all(each.dtype == tf.string for each in node.outputs)
    return is_text and all(has_no_result(each, program) for each in node.outputs)


def has_no_result(value: Value, program: Program) -> bool:
    """Whether no result of a program depends on a string, for example because it names a file."""
    for reader in program.readers(value):
        if reader.type in _WITHOUT_RESULT:
            continue
        if isinstance(reader, Return) or not reader.is_pure or reader.type in tf_compat.CALLS:
            return False
        if any(each.dtype != tf.string or not has_no_result(each, program) for each in reader.outputs):
            return False
    return True


def _attributes(node: Node) -> Iterator[bytes | Program]:
    """Yields the values of an operation's attributes, and the programs of the functions that they name."""
    definition = node.definition
    for name in sorted(definition.attr):
        if name not in _NOT_COMPARED:
            yield name.encode()
            yield from _value(node, definition.attr[name])


def _value(node: Node, attribute: AttrValue) -> Iterator[bytes | Program]:
    functions = [each for each in (attribute.func, *attribute.list.func) if each.name]
    if not functions:
        yield attribute.SerializeToString(deterministic=True)
    for each in functions:
        graph = tf_compat.graph_of_function(node.operation, each)
        # TensorFlow appends a number of the process to the names of functions.
        yield re.sub(r"_\d+$", "", each.name).encode() if graph is None else Program(graph)


def _words(node: Node | None) -> str:
    """Returns e.g. "Mul, float32[16,8] (train.py:12)"."""
    assert node is not None
    line = line_of(node)
    kinds = ", ".join(f"{each.dtype.name}{_extents(each)}" for each in node.outputs) or "no result"
    if node.type == "Const":
        value = node.outputs[0].constant()
        some = [] if value is None else np.asarray(value).ravel()[:_SHOWN].tolist()
        dots = ", ..." if value is not None and np.size(value) > _SHOWN else ""
        return f"the constant {kinds} {', '.join(map(str, some))}{dots}" + (f" ({line})" if line else "")
    settings = [f"{name}={text}" for name, each in node.definition.attr.items() if (text := _setting(name, each))]
    return f"{node.type}({', '.join(sorted(settings)[:_SHOWN])}), {kinds}" + (f" ({line})" if line else "")


def _extents(value: Value) -> str:
    return "[...]" if value.rank is None else f"[{','.join('?' if n is None else str(n) for n in value.shape)}]"


def _setting(name: str, attribute: AttrValue) -> str:
    kind = attribute.WhichOneof("value")
    is_shown = kind in ("i", "f", "b", "s") and name not in _NOT_COMPARED
    return str(getattr(attribute, kind)) if is_shown else ""
