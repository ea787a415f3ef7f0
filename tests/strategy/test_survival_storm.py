"""Ranks are killed at random moments of fit, two in each job of three, and the last one ends as one process does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from strategy.test_survival import check

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

SPAN_MS = {"mlp": 150, "cnn": 150, "lstm": 300, "attention": 200}  # about as long as a training takes


def storm(folder: Path, model: str, data: str, seed: int) -> None:
    """Loses two ranks of three: at moments of their own, at the same one, or the second while the other one goes on."""
    rng = random.Random(f"{model} {data} {seed}")
    first, second = rng.sample(range(3), 2)
    moment = rng.randrange(SPAN_MS[model])
    how = rng.choice(["apart", "together", "recovery"])
    later = f"{second}:{rng.randrange(SPAN_MS[model])}"
    if how != "apart":
        later = f"{second}:{moment}" if how == "together" else f"{second}:{rng.randrange(60)}:recovery"
    check(folder, model, data, "moment", f"{first}:{moment}", later)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
def test_ten_random_deaths(seed: int, tmp_path: Path) -> None:
    storm(tmp_path, "mlp", "arrays", seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5, 10))
@pytest.mark.parametrize(
    ("model", "data"),
    [("mlp", "dataset"), ("mlp", "several"), ("cnn", "arrays"), ("lstm", "arrays"), ("attention", "sequence")],
)
def test_fifty_random_deaths(model: str, data: str, seed: int, tmp_path: Path) -> None:
    storm(tmp_path, model, data, seed)
