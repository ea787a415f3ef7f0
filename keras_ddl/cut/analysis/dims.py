"""Extents of tensors as products of a number and named unknowns: 3 * rows * input:0[1].

The cut must know whether two extents are certainly equal, and whether one certainly divides the other. A product in
normal form answers both questions. A sum, a difference or an inexact quotient becomes a new unknown, the same one for
the same operands, so that values computed twice are still seen as equal. Nothing is equal by accident: unknown extents
are never equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")
_LONGEST = 200  # characters of a key
_DEEPEST = 64
_MOST = 16  # unknowns in a product; a longer product becomes a new unknown


@functools.total_ordering
class Unknown:
    """One integer that is known only when the step runs. Equal keys mean equal integers.

    Attributes:
        kind: how to compute it; see local_shapes.py.
        operands: the operands of the computation: (key of a value, place in it), or Dims.
        key: describes the computation; a digest if it is long, because keys of repeated operands would double at every
            step.
        is_extent: whether it is certainly not negative.
        depth: length of the longest chain of unknowns that it is computed from.
    """

    __slots__ = ("kind", "operands", "key", "is_extent", "depth")

    def __init__(self, kind: str, *operands: Dim | str | int) -> None:
        self.kind = kind
        self.operands = operands
        key = kind + (f"({', '.join(map(repr, operands))})" if operands else "")
        self.key = key if len(key) <= _LONGEST else f"{kind}#{blake2b(key.encode(), digest_size=16).hexdigest()}"
        self.is_extent = _is_extent(kind, self.dims)
        self.depth: int = 1 + max((each.depth for each in self.dims), default=0)

    @property
    def dims(self) -> list[Dim]:
        return [each for each in self.operands if isinstance(each, Dim)]

    def __repr__(self) -> str:
        return self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and self.key == other.key

    def __lt__(self, other: Unknown) -> bool:
        return self.key < other.key


def _is_extent(kind: str, operands: Sequence[Dim]) -> bool:
    if kind in ("rows", "extent", "size", "segments"):
        return True
    if kind in ("sum", "product", "quotient", "smaller"):
        return all(each.is_extent for each in operands)
    return kind == "larger" and any(each.is_extent for each in operands)


class Dim:
    """An integer: `factor` times the product of `unknowns` (sorted, with repetition). Immutable."""

    __slots__ = ("factor", "unknowns")

    def __init__(self, factor: int, unknowns: Iterable[Unknown] = ()) -> None:
        self.factor = int(factor)
        self.unknowns = tuple(sorted(unknowns)) if self.factor else ()

    @staticmethod
    def unknown(kind: str, *operands: Dim | str | int) -> Dim:
        return Dim(1, [Unknown(kind, *operands)])

    @property
    def number(self) -> int | None:
        """The integer, if it is known now."""
        return None if self.unknowns else self.factor

    @property
    def is_simple(self) -> bool:
        """Whether to follow it further; otherwise it is named after its tensor."""
        return all(each.depth <= _DEEPEST for each in self.unknowns)

    @property
    def depth(self) -> int:
        return max((each.depth for each in self.unknowns), default=0)

    def leaves(self) -> Iterator[Unknown]:
        """Yields the unknowns that are not computed from others, each once."""
        pending, seen = list(dict.fromkeys(self.unknowns)), set(self.unknowns)
        while pending:
            unknown = pending.pop()
            if not unknown.dims:
                yield unknown
            new = {inner for each in unknown.dims for inner in each.unknowns} - seen
            seen |= new
            pending += new

    @property
    def is_extent(self) -> bool:
        """Whether the integer is certainly not negative, like lengths of tensors and products of them."""
        return self.factor >= 0 and all(each.is_extent for each in self.unknowns)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.number == other
        return isinstance(other, Dim) and (self.factor, self.unknowns) == (other.factor, other.unknowns)

    def __hash__(self) -> int:
        return hash((self.factor, self.unknowns))

    def __repr__(self) -> str:
        parts = [str(self.factor)] if self.factor != 1 or not self.unknowns else []
        return "*".join([*parts, *map(str, self.unknowns)])

    def __mul__(self, other: Dim | int) -> Dim:
        other = dim(other)
        if len(self.unknowns) + len(other.unknowns) > _MOST:
            factors = sorted((Dim(1, self.unknowns), Dim(1, other.unknowns)), key=repr)
            return Dim(self.factor * other.factor, [Unknown("product", *factors)])
        return Dim(self.factor * other.factor, (*self.unknowns, *other.unknowns))

    def divided_by(self, other: Dim | int) -> Dim | None:
        """Returns the quotient if the division is certainly exact, else None."""
        other = dim(other)
        if other.factor == 0 or self.factor % other.factor:
            return None
        left = list(self.unknowns)
        for each in other.unknowns:
            if each not in left:
                return None
            left.remove(each)
        return Dim(self.factor // other.factor, left)

    def __add__(self, other: Dim | int) -> Dim:
        other = dim(other)
        if self.factor == 0:
            return other
        if other.factor == 0:
            return self
        if self.unknowns == other.unknowns:
            return Dim(self.factor + other.factor, self.unknowns)
        for one, added in ((self, other), (other, self)):
            term = one.unknowns[0] if one.factor == len(one.unknowns) == 1 else None
            if added.number is not None and term is not None and term.kind == "sum":  # (rows + 1) - 1
                first, second = term.dims
                if None in (first.number, second.number) and first.number != second.number:
                    rest, number = (first, second) if first.number is None else (second, first)
                    return rest + (number + added)
        return Dim.unknown("sum", *sorted((self, other), key=repr))

    def __sub__(self, other: Dim | int) -> Dim:
        return self + dim(other) * -1

    def floor_divided_by(self, other: Dim | int) -> Dim:
        other = dim(other)
        if self.number is not None and other.number:
            return Dim(self.number // other.number)
        exact = self.divided_by(other)
        return Dim.unknown("quotient", self, other) if exact is None else exact

    def larger_of(self, other: Dim | int) -> Dim:
        return self._one_of(dim(other), "larger", max)

    def smaller_of(self, other: Dim | int) -> Dim:
        return self._one_of(dim(other), "smaller", min)

    def _one_of(self, other: Dim, kind: str, choose: Callable[[int, int], int]) -> Dim:
        if self == other:
            return self
        if self.number is not None and other.number is not None:
            return Dim(choose(self.number, other.number))
        return Dim.unknown(kind, *sorted((self, other), key=repr))


def dim(value: Dim | int) -> Dim:
    return value if isinstance(value, Dim) else Dim(value)


def product(dims: Iterable[Dim | int]) -> Dim:
    """Returns the product of `dims`; 1 for none."""
    return functools.reduce(lambda a, b: a * b, map(dim, dims), ONE)


def total(dims: Sequence[Dim]) -> Dim:
    """Returns the sum of `dims`, at least one. Long sums are made in halves, so they stay shallow."""
    if len(dims) > 8:
        return total(dims[: len(dims) // 2]) + total(dims[len(dims) // 2 :])
    return functools.reduce(lambda a, b: a + b, dims)


def number_of(dims: Iterable[Dim | int]) -> int | None:
    return product(dims).number


class Uncertain(Exception):
    """Something about the step is uncertain when it is traced. A rule declines by letting this error pass."""


def certain(value: _T | None) -> _T:
    """Returns `value`. Raises: Uncertain: `value` is None."""
    if value is None:
        raise Uncertain
    return value


def if_certain(query: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
    """Returns the result of `query`, or None if it raises Uncertain."""
    try:
        return query(*args, **kwargs)
    except Uncertain:
        return None


ONE = Dim(1)
