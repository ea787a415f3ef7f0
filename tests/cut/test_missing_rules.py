"""tools/missing_rules.py finds removed rules, and only those: it lists what the cut could support but does not."""

from __future__ import annotations

import pytest
from cut.placements import Case

from harness.source_modules import ROOT, load_program
from keras_ddl.cut.analysis.placements import REPLICATED, Sharded
from keras_ddl.cut.operations import registry

PROGRAM = load_program(ROOT / "tools" / "missing_rules.py")
missing, table = PROGRAM.missing, PROGRAM.table


def test_missing_finds_placements_of_a_removed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("Sub", ["n2 f", "2 f"])
    before = {(each.operands, each.sliced) for each, _ in missing([case])}
    monkeypatch.delitem(registry._rules, ("Sub", False))
    found = [(each, case) for each, case in missing([case])]
    shards = next(each for each, _ in found if each.operands == (Sharded(0), REPLICATED))
    assert (shards.moved, shards.results, shards.finite) == ((0,), (frozenset({Sharded(0)}),), False)
    assert (shards.operands, shards.sliced) not in before
    assert any(
        "Sub (1) | S(0), R | S(0) | all | 0 | 640, 0 |" in line for line in table(found, {"Sub": 640}, {"Sub": 0})
    )


def test_missing_names_the_sufficient_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = registry.rule_of("Sub")
    monkeypatch.setitem(
        registry._rules,
        ("Sub", False),
        lambda b, node: rule(b, node) if all(b.placement(each) != REPLICATED for each in node.inputs) else None,
    )
    found = [each for each, _ in missing([Case("Sub", ["n2 f", "n2 f"])])]
    assert (Sharded(0), REPLICATED) in {each.operands for each in found}
    assert {each.sliced for each in found if Sharded(0) in each.operands} == {(Sharded(0), Sharded(0))}
