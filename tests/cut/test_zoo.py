"""Typical networks are cut: nothing that grows with the batch is sent, except the cases listed here."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest
from cut import zoo
from cut.counting import report_of

# Programs that still gather rows: (name, whether tracing sees the rows) -> {operation: reason}.
GATHERED: dict[tuple[str, bool], dict[str, str]] = {
    ("example_contrastive", True): {"MatMul": "the codes of one view are compared with all codes of the other"},
    ("example_contrastive", False): {"MatMul": "the same"},
}
# Bytes allowed besides gradients and moments of BatchNormalization, forward and backward: losses, metrics.
_NUMBERS = 4096


def check(name: str, make: Callable[[], zoo.Program], static: bool) -> None:
    keras.utils.set_random_seed(1)
    model, batch = make()
    model._symbolic_build(data_batch=batch if isinstance(batch, tuple) else (batch,))
    report = report_of(model.train_step, batch, static=static)
    known = GATHERED.get((name, static), {})
    gathers = [each for each in report.entries if each.kind == "gather" and not each.is_intentional]
    others = [each for each in gathers if each.reason.split()[0] not in known]
    assert not others, report.text()
    assert {each.reason.split()[0] for each in gathers} == set(known), f"no longer gathered:\n{report.text()}"
    assert set(report.replicated) <= set(known), report.text()
    moments = sum(each.value.shape.num_elements() * 4 for each in model.non_trainable_variables)
    summed = sum(each.bytes or 0 for each in report.entries if each.kind == "sum")
    assert summed <= 4 * (model.count_params() + moments) + _NUMBERS, report.text()


FEW = ("benchmark_cnn",)
NETWORKS = {**zoo.QUICK, **zoo.LONG}


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in NETWORKS]
)
def test_network_is_cut(name: str) -> None:
    check(name, NETWORKS[name], static=True)


@pytest.mark.long
@pytest.mark.parametrize("name", zoo.QUICK)
def test_network_is_cut_for_an_unknown_number_of_rows(name: str) -> None:
    check(name, zoo.QUICK[name], static=False)
