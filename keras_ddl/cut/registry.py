"""The rules by type of operation: how it is made from what a rank holds.

A rule is called with the builder and a node of which some input is not whole, and returns a (tensor, state) for each
output, or None: then the operation is computed whole. It must be right for every input it does not decline, on ranks
without rows, too, and must decide alike on every rank: from whole extents, never from the number of a rank's own rows.
A rule registered with `of_whole=True` is asked where all inputs are whole: random numbers, of which a rank draws its
own rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]
_rules: dict[tuple[str, bool], Rule] = {}


def rule(*types: str, of_whole: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for types of operations."""

    def register(function: Rule) -> Rule:
        for each in types:
            assert (each, of_whole) not in _rules, f"two rules for {each}"
            _rules[each, of_whole] = function
        return function

    return register


def rule_of(operation_type: str, of_whole: bool = False) -> Rule | None:
    """Returns the rule for a type of operation, or None."""
    return _rules.get((operation_type, of_whole))


def types_with_rules() -> list[str]:
    """Returns the types of operations that have a rule."""
    return sorted({each for each, _ in _rules})
