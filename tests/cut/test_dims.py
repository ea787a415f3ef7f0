"""Extents as products: statements about them must hold for all values of the unknowns."""

import random

import pytest

from keras_ddl.cut.analysis.dims import Dim, Unknown, dim, number_of, product, total

NAMES = ("rows", "t", "k")


def value(of: Dim, known: dict[str, int]) -> int:
    """Returns the integer for given values of the unknowns."""
    found = of.factor
    for each in of.unknowns:
        if not each.operands:
            found *= known[each.kind]
            continue
        a, b = (value(operand, known) for operand in each.operands)
        found *= {"sum": a + b, "quotient": a // b, "larger": max(a, b), "smaller": min(a, b), "product": a * b}[
            each.kind
        ]
    return found


def drawn(rng: random.Random) -> Dim:
    found = product(Dim.unknown(rng.choice(NAMES)) for _ in range(rng.randrange(3))) * rng.randrange(1, 5)
    return found + rng.randrange(3) if rng.random() < 0.3 else found


@pytest.mark.parametrize("seed", range(200))
def test_dims_arithmetic_matches_integers(seed):
    rng = random.Random(seed)
    a, b = drawn(rng), drawn(rng)
    known = {name: rng.randrange(1, 7) for name in NAMES}
    one, other = value(a, known), value(b, known)
    assert value(a * b, known) == one * other
    assert value(a + b, known) == one + other
    assert value(a - b, known) == one - other
    assert value(a.floor_divided_by(b), known) == one // other
    assert value(a.larger_of(b), known) == max(one, other)
    assert value(a.smaller_of(b), known) == min(one, other)
    quotient = a.divided_by(b)
    assert quotient is None or value(quotient, known) * other == one
    assert (a == b) <= (one == other)


def test_dims_are_equal_only_when_certain():
    rows, tokens = Dim.unknown("rows"), Dim.unknown("t")
    assert rows * tokens == tokens * rows and rows * 2 != rows and rows != tokens
    assert (rows + tokens) == (tokens + rows) and rows + 0 == rows and rows - rows == 0
    assert (rows * 6 * tokens).divided_by(rows * 3) == tokens * 2
    assert (rows * 3).divided_by(2) is None and rows.divided_by(tokens) is None and rows.divided_by(0) is None
    assert Dim(3) == 3 and dim(3).number == 3 and rows.number is None
    assert number_of([2, Dim(5)]) == 10 and number_of([rows, 2]) is None and product([]) == 1
    assert Unknown("entry", "x:0", 1) == Unknown("entry", "x:0", 1) != Unknown("entry", "x:0", 2)


def test_sums_with_numbers_are_compared() -> None:
    rows = Dim.unknown("rows")
    assert (rows + 1) - 1 == rows and (rows * 2 + 3) + 4 == rows * 2 + 7 and (rows + 1) - 2 != rows
    assert (rows + rows * rows) + 1 != rows and ((rows + 1) * 2) - 2 != rows


def test_operands_of_a_number_are_known() -> None:
    rows = Dim.unknown("rows")
    more, half = rows + 1, (rows + 1).floor_divided_by(2)
    assert [each.depth for each in (Dim(3), rows, rows * 2, more, half)] == [0, 1, 1, 2, 3]
    assert [len(list(one.leaves())) for one in (Dim(3), rows * rows, half * rows)] == [0, 1, 1]
    assert more.unknowns[0].dims == [Dim(1), rows] and rows.unknowns[0].dims == []
    assert [repr(each) for each in (Dim(1), Dim(0), rows, rows * 3)] == ["1", "0", "rows", "3*rows"]
    assert total([rows] * 9) == rows * 9 and total([Dim(2), Dim(3), rows]) == rows + 5


def test_certainly_nonnegative_numbers_are_known() -> None:
    rows, entry = Dim.unknown("rows"), Dim.unknown("entry", "x:0", 0)
    extents = (Dim(0), rows, rows * 2, rows + 1, (rows + 1) * rows, (rows + 1).floor_divided_by(2), rows.smaller_of(3))
    assert all(each.is_extent for each in (*extents, entry.larger_of(0), Dim.unknown("extent", "x:0", 0)))
    others = (Dim(-1), entry, rows * -1, rows - 1, rows * entry, entry.smaller_of(3), entry.larger_of(-1))
    assert not any(each.is_extent for each in others)


def test_long_products_are_one_unknown() -> None:
    rows = Dim.unknown("rows")
    product_of_16 = product([rows] * 16)
    assert len(product_of_16.unknowns) == 16 and len((product_of_16 * rows).unknowns) == 1
    assert (product_of_16 * rows) == (rows * product_of_16) and (product_of_16 * 3 * rows).factor == 3
    assert (product_of_16 * rows).is_extent
