"""Extents as products: what is said of them must hold for every value of the unknowns."""

import random

import pytest

from keras_ddl.cut.dims import Dim, Unknown, dim, number_of, product

NAMES = ("rows", "t", "k")


def value(of: Dim, known: dict[str, int]) -> int:
    """The integer, for given unknowns."""
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
def test_dims_arithmetic_is_that_of_integers(seed):
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


def test_sums_with_numbers_are_told() -> None:
    rows = Dim.unknown("rows")
    assert (rows + 1) - 1 == rows and (rows * 2 + 3) + 4 == rows * 2 + 7 and (rows + 1) - 2 != rows
    assert (rows + rows * rows) + 1 != rows and ((rows + 1) * 2) - 2 != rows
