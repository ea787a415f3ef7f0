"""Rules by type of operation: how a rank builds it from operands in their placements.

A rule is called with the context and a node that has an operand that is not replicated. It returns a (tensor,
placement) for each output. It declines by returning None, or by letting Uncertain pass (dims.py): then the operation is
built from replicated operands. It must be right for every operand that it does not decline, even on ranks without rows,
and must decide alike on every rank: from global extents, never from the number of a rank's own rows. A rule registered
with `of_replicated=True` is called if all operands are replicated, as for random numbers, where a rank draws only its
own rows.
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
