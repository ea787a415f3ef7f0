"""Runs every example as its docstring says, in a small size: on 2 ranks and, if that is quick, in one process."""

import csv
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.examples import EXAMPLES, held_out_accuracy, run
from launch.launching import Started, eventually, processes

COMMAND = Path(sys.executable).with_name("keras-ddl")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def run_on_two_ranks(folder: Path, script: str, *arguments: object) -> str:
    return run(folder, COMMAND, "run", "-np", 2, "python", EXAMPLES / script, *arguments)


@pytest.mark.long
def test_demo_trains_exports_and_predicts(tmp_path):
    output = run(tmp_path, sys.executable, EXAMPLES / "demo.py", "--epochs", 6, "--minimum-accuracy", 0.9)
    # The export's own proof; which of the two depends on the kind of CPU.
    assert re.search(r"a clean process as the trained model did, (bit for bit|to within \d\.\de-\d+ \(allowed)", output)
    assert "keras_ddl and Keras cannot be imported here" in output
    assert "accuracy on 360 held-out images: 0.9" in output
    for line in ("Training curve", "train ", "export ", "predict ", "all "):
        assert f"\n{line}" in output or f"== {line}" in output, line
    # An accuracy that is too low is an error.
    predict = (sys.executable, EXAMPLES / "predict_saved_model.py", "demo-output/saved_model")
    failed = run(tmp_path, *predict, "demo-output/held_out.npz", "--minimum-accuracy", 1.01, status=1)
    assert "The accuracy must be 1.01 or more" in failed


def test_demo_does_not_touch_a_foreign_folder(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("")
    refused = run(tmp_path, sys.executable, EXAMPLES / "demo.py", "--output-dir", "theirs", status=1)
    assert "must be new, empty or an earlier demo's" in refused
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["thesis.txt"]


def test_digits_alone_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("RESULT_DIR", str(tmp_path / "results"))
    run(tmp_path, sys.executable, EXAMPLES / "digits.py", "--epochs", 1)
    output = run(tmp_path, sys.executable, EXAMPLES / "digits.py", "--epochs", 2, "--resume")
    assert "resuming from step" in output and "on 1 rank(s)" in output
    with (tmp_path / "results" / "history.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1"]


def test_custom_loop_learns_on_two_ranks(tmp_path):
    output = run_on_two_ranks(tmp_path, "custom_loop.py", "--epochs", 5)
    assert "weights bitwise equal" in output
    assert held_out_accuracy(output) > 0.9


@pytest.mark.long
def test_horovod_scripts_learn_on_two_ranks(tmp_path):
    output = run_on_two_ranks(tmp_path, "horovod/keras_digits.py", "--epochs", 4)
    assert held_out_accuracy(output) > 0.85
    assert [path.name for path in (tmp_path / "horovod-keras-output").glob("*-4.keras")] == ["checkpoint-4.keras"]
    output = run_on_two_ranks(tmp_path, "horovod/tape_digits.py", "--steps", 160)
    assert held_out_accuracy(output) > 0.9


@pytest.mark.long
def test_elastic_horovod_script_continues_after_a_kill(tmp_path):
    script = str(EXAMPLES / "horovod" / "elastic_digits.py")
    options = ["-np", "2", "--restarts", "1", "--output-dir", "out"]
    job = Started(["run", *options, "python", script, "--epochs", "20"], tmp_path)
    job.wait_for(tmp_path / "out" / "rank-0.log")
    assert eventually(lambda: "Epoch 5/20" in (tmp_path / "out" / "rank-0.log").read_text())
    programs = [pid for pid, command in processes(job.mark).items() if script in command and "launch" not in command]
    (victim,) = [pid for pid in programs if b"OMPI_COMM_WORLD_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    ended = job.finish()
    assert ended.status == 0, ended
    assert "restart 1 of 1, with 2 ranks (rank 1: killed by SIGKILL)" in ended.err, ended
    begun = re.findall(r"training from epoch (\d+), batch \d+ on 2 rank", ended.out)
    assert begun[0] == "0" and 4 <= int(begun[1]) < 20, ended
    assert f"Epoch {20 - int(begun[1])}/{20 - int(begun[1])}" in ended.out, ended
    assert held_out_accuracy(ended.out) > 0.9


@pytest.mark.long
def test_contrastive_learns_equally_on_any_number_of_ranks(tmp_path):
    arguments = (EXAMPLES / "contrastive.py", "--epochs", 2)
    alone = run(tmp_path, sys.executable, *arguments)
    shared = run_on_two_ranks(tmp_path, *arguments)
    losses = [re.search(r"loss (\d\.\d{3}) -> (\d\.\d{3})", output) for output in (alone, shared)]
    assert losses[0] and losses[1], alone + shared
    np.testing.assert_allclose(
        [float(x) for x in losses[1].groups()], [float(x) for x in losses[0].groups()], atol=2e-3
    )
    assert "on 2 rank(s)" in shared
