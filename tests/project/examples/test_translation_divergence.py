"""The divergence study: its rules on made-up curves, its picture, and the command on ranks."""

import argparse
import functools
import json
import sys

import numpy as np
import pytest
from examples.translation_parts import divergence, diverging, rows

from harness.examples import EXAMPLES, run
from harness.launching import python_path

BLIND = 4.7
FALLING = np.linspace(6.0, 1.0, 100)


def training(losses, way=diverging.WITHOUT, acts=()):
    return diverging.Training(512, 0.02, way, BLIND, list(losses), [0.02] * 50 + [0.005] * 50, list(acts))


@pytest.mark.parametrize(
    ("losses", "rule"),
    [
        (FALLING, ""),
        (FALLING + np.where(np.arange(100) % 20 == 0, 3.0, 0.0), ""),  # spikes that recover
        (np.append(FALLING[:50], [3.5] * 50), ""),  # stays constant
        (np.append(FALLING[:99], np.nan), "not finite"),
        (np.append(FALLING[:40], [np.inf] * 60), "not finite"),
        (np.linspace(6.0, 4.8, 100), "blind"),
        (np.append(FALLING, [4.8] * 100), "blind"),  # fell, and rose again
        (FALLING[:20], "blind"),  # stopped by the guard
        (np.append(FALLING, np.linspace(1.0, 2.0, 100)), "risen"),
    ],
)
def test_training_counts_as_diverged_by_a_rule(losses, rule):
    assert divergence.diverged(losses, 100, BLIND) == rule


def test_row_reports_the_guards_actions(tmp_path):
    stopped = training([5.0] * 50, diverging.STOP, [(50, "DivergenceGuard: loss is 5. Training stops.")])
    back = training(FALLING, diverging.BACK, [(50, "DivergenceGuard: loss is 5. Training goes back to step 0 ...")])
    found = [divergence.row(each, 100) for each in (training(FALLING), stopped, back)]
    assert [each["guard, after steps"] for each in found] == ["", "50: stops", "50: on at 0.005"]
    assert [(each["steps"], each["diverged"]) for each in found] == [(100, ""), (50, "blind"), (100, "")]
    assert found[0]["loss in the end"] == pytest.approx(FALLING[-10:].mean())
    options = rows.parse(
        argparse.ArgumentParser(parents=[rows.options("x")]), ["--plot", str(tmp_path / "picture.png")]
    )
    broken = training([6.0, np.nan], diverging.WITH)
    rows.show(found, options, functools.partial(divergence.draw, [training(FALLING), broken, stopped, back]))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.parallel
def test_command_trains_in_all_ways(tmp_path):
    command = (sys.executable, "-m", "translation.studies.divergence", "--rates", 0.05, "--tokens", 256, "--steps", 14)
    model = ("--layers", 1, "--width", 16, "--inner", 16, "--window", 2, "--grace", 3, "--retries", 1, "--warmup", 5)
    options = ("--json", "rows.json", "--plot", "picture.png")
    output = run(tmp_path, *command, *model, *options, env={"PYTHONPATH": python_path(EXAMPLES)})
    assert "picture: picture.png" in output and (tmp_path / "picture.png").stat().st_size > 10_000
    found = {each["what"]: each for each in json.loads((tmp_path / "rows.json").read_text())}
    assert list(found) == list(diverging.WAYS)
    assert {each["how"] for each in found.values()} == {"measured"}
    # Six steps are too few for learning.
    assert [each["steps"] for each in found.values()] == [14, 14, 6, 12]
    said = [each["guard, after steps"] for each in found.values()]
    assert said == ["", "", "6: stops", "6: on at 0.0125; 12: stops"]
    assert all(each["diverged"] == "blind" for each in found.values())
    assert found["with warm-up"]["loss in the end"] != found["without warm-up"]["loss in the end"]
