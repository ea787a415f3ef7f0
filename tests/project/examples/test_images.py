"""examples/images: its pictures and training, the parts of its study, and its predictions of published trainings."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.examples import EXAMPLES, held_out_accuracy, run

sys.path.insert(0, str(EXAMPLES / "images"))  # removed again below, because its modules have plain names
import drawing
import figures
import resnet
import study
import train

sys.path.remove(str(EXAMPLES / "images"))

COMMAND = Path(sys.executable).with_name("keras-ddl")
TINY = ["--images", "400", "--held-out", "200", "--width", "4", "--epochs", "4", "--batch-size", "128"]


def test_pictures_have_all_classes_and_depend_only_on_the_seed():
    images, labels = drawing.draw(600, seed=3)
    assert images.shape == (600, 24, 24, 3) and images.dtype == np.uint8 and labels.dtype == np.int32
    np.testing.assert_array_equal(np.bincount(labels), np.full(200, 3))
    again, same = drawing.draw(600, seed=3)
    np.testing.assert_array_equal(images, again)
    np.testing.assert_array_equal(labels, same)
    others, _ = drawing.draw(600, seed=4)
    assert (images != others).mean() > 0.9
    assert 60 < images.mean() < 195 and images.std() > 30


def test_resnet_has_its_layers_and_blocks_start_as_the_identity():
    model = resnet.resnet(24, 200, width=4)
    kinds = [type(layer).__name__ for layer in model.layers]
    assert model.name == "resnet8" and kinds.count("Conv2D") - 2 + kinds.count("Dense") == 8  # two are shortcuts
    last = [layer for layer in model.layers if type(layer).__name__ == "BatchNormalization"]
    assert sum(float(np.abs(layer.gamma).max()) == 0 for layer in last) == 3
    assert model.output_shape == (None, 200)


def test_training_scales_the_rate_with_the_batch_and_warms_up(tmp_path):
    said = []
    train.main([*TINY, "--warmup-epochs", "2", "--output-dir", str(tmp_path)], said.append)
    with (tmp_path / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["learning_rate"]) for row in rows]
    assert rates == pytest.approx([0.075, 0.1, 0.1, 0.01])  # 0.05 for 64; two epochs of warm-up, the last at a tenth
    assert len(said) == 1 and held_out_accuracy(said[0]) == pytest.approx(float(rows[-1]["val_accuracy"]), abs=1e-4)


def test_study_runs_each_training_once_and_keeps_earlier_results(tmp_path, monkeypatch):
    file, made = tmp_path / "study.json", []

    def trained(options, verbose):
        made.append((options.batch_size, options.scaling, options.warmup_epochs, options.epochs))
        return {"val_accuracy": [0.1, 0.5], "loss": [5.0, 3.0]}

    monkeypatch.setitem(sys.modules, "train", SimpleNamespace(train=trained, parser=train.parser, BASE_BATCH=64))
    monkeypatch.setattr(study.os, "environ", {})
    study.update(file, "time", "kept")
    study.accuracy(file, [256, 64], ["--epochs", "2"])
    assert made == [(256, "none", 0, 2), (256, "linear", 0, 2), (256, "linear", 3, 2), (64, "none", 0, 2)]
    study.accuracy(file, [64, 256], [])
    results = json.loads(file.read_text())
    assert len(made) == 4 and results["time"] == "kept" and len(results["accuracy"]) == 4
    assert results["accuracy"]["256, linear scaling"]["val_accuracy"] == [0.1, 0.5]


def test_pictures_are_drawn_from_stored_results(tmp_path):
    figures.draw(json.loads(study.RESULTS.read_text()), tmp_path)
    assert "| 1,024 | " in figures.tables(json.loads(study.RESULTS.read_text()))
    drawn = {path.name for path in tmp_path.iterdir()}
    kept = {path.name for path in study.RESULTS.parent.iterdir()} - {study.RESULTS.name}
    assert drawn == kept and {"classes.png", "accuracy.svg", "predicted.svg"} <= drawn


@pytest.mark.long
@pytest.mark.parallel
def test_training_on_two_ranks_learns_and_measures_its_steps(tmp_path):
    words = ["--images", 6_000, "--held-out", 500, "--epochs", 6, "--batch-size", 128, "--warmup-epochs", 1]
    output = run(tmp_path, COMMAND, "run", "-np", 2, "python", EXAMPLES / "images" / "train.py", *words)
    assert "on 2 rank(s)" in output and held_out_accuracy(output) > 0.5
    options = ["--json", tmp_path / "study.json", "--rounds", 1, "--steps", 3, "--epochs", 1, "--ranks", 2]
    run(tmp_path, sys.executable, EXAMPLES / "images" / "study.py", "time", *options)
    found = json.loads((tmp_path / "study.json").read_text())["time"]
    assert [row["ranks"] for row in found["measured"]] == [1, 2]
    assert all(row["reached"]["epochs"] == 1 for row in found["measured"])
