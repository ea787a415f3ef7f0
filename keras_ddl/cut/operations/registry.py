"""Registers rules. A rule builds operations of some types on a rank, from operands in their placements.

A rule is called with the context and a node of which at least one operand is not replicated. It returns a (tensor,
placement) for each output. It declines by returning None or raising Uncertain (dims.py); the operation is then built
from replicated operands. It must be right for all operands that it accepts, even on ranks without rows. It must decide
in the same way on every rank, so it may use global extents, but not the number of this rank's rows. A rule registered
with `of_replicated=True` is called if all operands are replicated, for example to draw only this rank's rows of random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.cut.analysis.placements import PlacedOutputs
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.context import Context

Rule = Callable[[Context, Node], PlacedOutputs | None]
_rules: dict[tuple[str, bool], Rule] = {}


def rule(*types: str, of_replicated: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for types of operations."""

    def register(function: Rule) -> Rule:
        for each in types:
            assert (each, of_replicated) not in _rules, f"two rules for {each}"
            _rules[each, of_replicated] = function
        return function

    return register


def rule_of(operation_type: str, of_replicated: bool = False) -> Rule | None:
    """Returns the rule for a type of operation, or None."""
    return _rules.get((operation_type, of_replicated))


def types_with_rules() -> list[str]:
    return sorted({each for each, _ in _rules})
