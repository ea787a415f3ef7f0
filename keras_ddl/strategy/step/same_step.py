"""Checks, before a step first runs, that all ranks have traced the same step, which reads the same values.

Ranks compare one digest of a step: its operations with attributes and constants, and the values it reads besides its
arguments (captured_values.py). Numeric variables are left out, because they get rank 0's values. If digests differ,
ranks look for the first difference, to name it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keras_ddl import communicator, cut
from keras_ddl.compat import models
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import RankMismatchError
from keras_ddl.strategy import agreement
from keras_ddl.strategy.step.captured_values import Read, reads_of

_TRACE_REMEDY = "Remove everything that depends on the rank; code that uses keras_ddl.rank() belongs outside the step."
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class _Entry(NamedTuple):
    """A part of a step, or a value that it reads. what: returns its description. show: returns this rank's version."""

    digest: bytes
    what: Callable[[], str]
    show: Callable[[], str]
    rule: str
    remedy: str


class TracedStep:
    """A traced step, as ranks compare it.

    Args:
        name: the name of the step in messages.
        returned: the structure that the step returns.
        owners: objects that may hold captured values (the model or the traced function), to name these in messages.
    """

    def __init__(self, name: str, program: cut.Program, returned: Any, owners: Sequence[Any], rank: int) -> None:
        self._name, self._program, self._owners, self._rank = name, program, owners, rank
        self._returned = repr(tf.nest.map_structure(_leaf, returned))
        known = [each for owner in owners if isinstance(owner, keras.Model) for each in agreement.all_variables(owner)]
        handles = [getattr(models.inner_variable(each), "handle", None) for each in known]
        places = {id(handle): place for place, handle in enumerate(handles) if handle is not None}
        self._reads = reads_of(name, program, places, rank)

    def digest(self) -> bytes:
        """Returns 32 bytes that differ if ranks have traced or read different things."""
        return hashlib.sha256(self.digest_of_reads() + self.digest_of_trace()).digest()

    def digest_of_reads(self) -> bytes:
        """Like `digest`, but of the values that the step reads."""
        return hashlib.sha256(b"".join(each.digest for each in self._reads)).digest()

    def digest_of_trace(self) -> bytes:
        """Like `digest`, but of a traced function."""
        return hashlib.sha256(cut.trace_digest(self._program) + self._returned.encode()).digest()

    def explain(self, scope: str) -> RankMismatchError:
        """Returns an error with the first difference. COLLECTIVE; `scope` begins the collective's name."""
        mine = [*self._entries()]
        digests = communicator.all_gather_object([each.digest for each in mine], name=f"{scope}/traced_parts")
        longest = max(range(len(digests)), key=lambda rank: len(digests[rank]))
        place = next(
            (i for i in range(len(digests[longest])) if len({tuple(each[i : i + 1]) for each in digests}) > 1), 0
        )
        entry = mine[place] if place < len(mine) else None
        words = None if entry is None else (entry.what(), entry.show(), entry.rule, entry.remedy)
        shown = communicator.all_gather_object(words, name=f"{scope}/traced_differently")
        first = [each[place : place + 1] for each in digests]
        others = [rank for rank, each in enumerate(first) if each != first[0]]
        other = others[0] if others else 0
        ranks = f"rank {', '.join(map(str, others))}"
        _, _, rule, remedy = next(each for each in shown if each is not None)
        received = f"{_side_by_side(shown[0], shown[other], ranks)} (rank {self._rank})"
        return RankMismatchError(f"{self._name}: {rule} Received: {received}. {remedy}")

    def _entries(self) -> Iterator[_Entry]:
        for each in self._reads:
            rule = "all ranks must read the same values in a step, apart from its arguments."
            yield _Entry(each.digest, functools.partial(self._words, each), each.show, rule, each.remedy)
        rule = "all ranks must trace the same step."
        for part in cut.trace_parts(self._program):
            digest = hashlib.sha256(part.content).digest()[:8]
            yield _Entry(digest, str, functools.partial(str, part), rule, _TRACE_REMEDY)
        yield _Entry(self._returned.encode(), lambda: "the result", lambda: self._returned, rule, _TRACE_REMEDY)

    def _words(self, read: Read) -> str:
        where = next((found for owner in self._owners if (found := _place_in(owner, read.outer))), "")
        line = f", read in {found}" if (found := read.line()) else ""
        return f"{where} ({read.kind}{line})" if where else f"{read.kind}{line}"


def _side_by_side(first: tuple[str, ...] | None, other: tuple[str, ...] | None, ranks: str) -> str:
    """Describes two ranks' entries, for a message. None: the rank has no such entry."""
    if first is None or other is None:
        texts = ["nothing more" if each is None else " ".join(filter(None, each[:2])) for each in (first, other)]
    elif first[:2] == other[:2]:
        return f"{' '.join(filter(None, first[:2]))} on rank 0, and another on {ranks}"
    elif first[0] == other[0]:
        texts = [f"{first[0]}{': ' if first[0] else ''}{first[1]}", other[1]]
    else:
        texts = [": ".join(filter(None, each[:2])) for each in (first, other)]
    return f"{texts[0]} on rank 0, and {texts[1]} on {ranks}"


def _leaf(leaf: Any) -> Any:
    """Describes a non-tensor value in a result: numbers and strings are compared, objects by their type."""
    if tf.is_tensor(leaf):
        return "tensor"
    return leaf if type(leaf) in _PLAIN else type(leaf).__name__


def _place_in(owner: Any, tensor: tf.Tensor) -> str:
    """Returns where an object holds a captured value, e.g. "layer 'features', attribute w"; "" if not found."""
    if isinstance(owner, keras.layers.Layer):
        found = models.attribute_with(owner, lambda value: _holds(value, tensor))
        return "" if found is None else f"layer {found[0].name!r}, attribute {found[1]}"
    for name, value in _names_of(owner).items():
        if _holds(value, tensor):
            return name
        if isinstance(value, keras.layers.Layer) and (place := _place_in(value, tensor)):
            return place
    return ""


def _holds(value: Any, tensor: tf.Tensor) -> bool:
    """Whether a value is the captured tensor, or a table or a variable with that handle."""
    if value is tensor:
        return True
    return any(getattr(value, name, None) is tensor for name in ("resource_handle", "handle"))


def _names_of(function: Any) -> Mapping[str, Any]:
    """Returns the names that a function can use: enclosing variables, its module's, and its object's attributes."""
    function = getattr(function, "python_function", function)
    owner = getattr(function, "__self__", None)
    names = dict(getattr(owner, "__dict__", {}))
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        names |= {**variables.globals, **variables.nonlocals}
    return names
