"""Rank 0 is killed, the next rank continues its writing, and the results equal those of one process."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf

from keras_ddl import checkpoint as ckpt
from keras_ddl import parts
from launch.launching import Ended, run, write_program

WITHOUT_BASE = parts.is_missing("export")
SECOND = (
    2 if WITHOUT_BASE else 3
)  # number of the second checkpoint among published directories; the base graph comes first
PROGRAM = str(Path(__file__).with_name("writing_training.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet, pytest.mark.long]


@pytest.fixture(scope="session")
def one_process_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "written"
    subprocess.run([sys.executable, PROGRAM, str(folder)], capture_output=True, check=True)
    return folder


def points(folder: Path) -> dict[tuple[str, str, int], Any]:
    """Returns the scalars by writer, tag and step, without those that measure the job's speed."""
    actual = {}
    for path in sorted(folder.rglob("events*")):
        writer = str(path.parent.relative_to(folder))
        for event in tf.compat.v1.train.summary_iterator(str(path)) if writer != "job" else ():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    actual[writer, value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    return actual


@cache
def arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a Keras file or of a checkpoint, by name."""
    if path.is_dir():
        bundles = (tf.train.load_checkpoint(str(path / part)) for part in ("weights", "optimizer"))
        return {name: each.get_tensor(name) for each in bundles for name in each.get_variable_to_shape_map()}
    data = io.BytesIO(zipfile.ZipFile(path).read("model.weights.h5")) if path.suffix == ".keras" else path
    kept: dict[str, np.ndarray] = {}
    with h5py.File(data) as file:
        file.visititems(lambda name, one: kept.update({name: one[()]} if isinstance(one, h5py.Dataset) else {}))
    return kept


def equal_arrays(one: dict[str, Any], other: dict[str, Any], where: Path) -> None:
    assert one.keys() == other.keys(), where
    for name, value in one.items():
        if np.asarray(value).dtype.kind in "fiu":
            np.testing.assert_allclose(value, other[name], rtol=1e-10, atol=1e-12, err_msg=f"{where} {name}")


def rows(path: Path) -> list[list[str]]:
    content = path.read_bytes().decode()
    assert content.endswith("\r\n"), content
    return list(csv.reader(io.StringIO(content)))


def check_equal(left: Path, one: Path, absent: tuple[int, ...] = ()) -> None:
    """`absent`: steps that may lack a checkpoint."""
    seen, expected = (json.loads((each / "result.json").read_text()) for each in (left, one))
    assert seen["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(seen["history"][name], values, rtol=1e-12, err_msg=name)
    for name in ("seen", "predicted"):
        np.testing.assert_allclose(seen[name], expected[name], rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(seen["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)
    (header, *mine), (names, *theirs) = rows(left / "log.csv"), rows(one / "log.csv")
    assert header == names
    np.testing.assert_allclose(np.array(mine, float), np.array(theirs, float), rtol=1e-12)
    mine, theirs = points(left / "points"), points(one / "points")
    assert mine.keys() == theirs.keys()
    np.testing.assert_allclose([mine[each] for each in theirs], list(theirs.values()), rtol=1e-6)
    for saved in ("best.keras", *(f"epochs/{epoch}.weights.h5" for epoch in (1, 2, 3)), "backup/latest.weights.h5"):
        equal_arrays(arrays(left / saved), arrays(one / saved), left / saved)
    metadata = "backup/training_metadata.json"
    assert (left / metadata).read_text() == (one / metadata).read_text()
    assert not [path for path in left.rglob(".tmp-*") if path.is_dir()]
    check_checkpoints(left / "ckpt", one / "ckpt", absent)


def check_checkpoints(left: Path, one: Path, absent: tuple[int, ...] = ()) -> None:
    saved, expected = ({each.step: each for each in ckpt.list_checkpoints(folder)} for folder in (left, one))
    assert saved.keys() <= expected.keys() and expected.keys() - saved.keys() <= set(absent)
    for step, each in saved.items():
        ckpt.validate(each)
        equal_arrays(arrays(each.path), arrays(expected[step].path), each.path)
    assert ckpt.list_bases(left) == ([] if WITHOUT_BASE else [None])


def train(tmp_path: Path, *plan: str, ranks: int = 3) -> Ended:
    ended = run(["run", "-np", f"1:{ranks}", "python", PROGRAM, "written", *plan], tmp_path)
    assert ended.status == 0, ended
    assert ended.err.count(" was lost (killed by SIGKILL); ") == len(plan), ended
    return ended


def check(tmp_path: Path, one: Path, *plan: str, absent: tuple[int, ...] = (), twice: tuple[int, ...] = ()) -> Ended:
    """`twice`: epochs whose first line may be shown twice."""
    ended = train(tmp_path, *plan)
    check_equal(tmp_path / "written", one, absent)
    for epoch in (1, 2, 3):
        assert 1 <= ended.out.count(f"Epoch {epoch}/3\n") <= 1 + (epoch in twice), ended
    assert "[1]" not in ended.out, ended
    return ended


def test_rank_0_is_killed_in_the_middle_of_a_step(tmp_path: Path, one_process_run: Path) -> None:
    check(tmp_path, one_process_run, "step:7:0")


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(
    "hook",
    ["train_begin:0", "train_batch_begin:0", "train_batch_end:8", "test_begin:10", "test_batch_begin:5", "test_end:10"]
    + ["epoch_end:1", "epoch_begin:2", "epoch_end:2", "train_end:15"],
)
def test_rank_0_is_killed_in_a_hook(place: str, hook: str, tmp_path: Path, one_process_run: Path) -> None:
    # The checkpoint of the epoch that has just ended may still be on its way to disk.
    twice = (3,) if f"{place}-{hook}" == "last-epoch_begin:2" else ()  # the bar has started
    is_written = f"{place}-{hook}" not in ("last-epoch_end:1", "first-epoch_begin:2", "last-epoch_begin:2")
    check(tmp_path, one_process_run, f"{place}-{hook}:0", absent=() if is_written else (10,), twice=twice)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", range(1, 40, 3))
def test_a_rank_is_killed_while_fit_starts(number: int, rank: int, tmp_path: Path, one_process_run: Path) -> None:
    check(tmp_path, one_process_run, f"collective:{number}:{rank}")


@pytest.mark.parametrize("where", ["checkpoint", "renamed"])
def test_rank_0_is_killed_while_a_checkpoint_is_written(where: str, tmp_path: Path, one_process_run: Path) -> None:
    """The checkpoint of step 10 may be missing."""
    check(tmp_path, one_process_run, f"{where}:{SECOND}:0", absent=(10,) if where == "checkpoint" else ())


def test_run_resumes_from_checkpoints_of_the_next_rank(tmp_path: Path, one_process_run: Path) -> None:
    plan = [f"checkpoint:{SECOND}:0", "step:13:1", "step:13:2"]
    ended = run(["run", "-np", "1:3", "python", PROGRAM, "written", *plan], tmp_path)
    assert ended.status == 137, ended
    saved = [each.step for each in ckpt.list_checkpoints(tmp_path / "written" / "ckpt")]
    assert saved in ([5], [5, 10]), ended
    ended = train(tmp_path, ranks=2)
    assert "Checkpoint: resuming from step" in ended.out, ended
    seen, expected = (
        json.loads((each / "result.json").read_text()) for each in (tmp_path / "written", one_process_run)
    )
    for mine, theirs in zip(seen["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)
    check_checkpoints(tmp_path / "written" / "ckpt", one_process_run / "ckpt", absent=(10,))


PREDICTING = """
import signal
import keras, numpy as np
import keras_ddl
strategy = keras_ddl.Strategy(seed=3, gather_predictions="rank0")
me = strategy.rank
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")

class Ends(keras.callbacks.Callback):
    def on_predict_batch_begin(self, batch, logs=None):
        if batch == 2 and me == LOST:
            os.kill(os.getpid(), signal.SIGKILL)

x = np.arange(40.0).reshape(20, 2)
made = model.predict(x, batch_size=4, verbose=0, callbacks=[Ends()])
if strategy.rank == 0:
    np.testing.assert_allclose(made, x.sum(1, keepdims=True))
    print("right", flush=True)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_predictions_gathered_on_rank_0_are_lost_with_it(lost: int, tmp_path: Path) -> None:
    program = write_program(tmp_path, PREDICTING.replace("LOST", str(lost)))
    ended = run(["run", "-np", "1:3", "python", program], tmp_path)
    assert (ended.status, ended.out.count("right")) == ((137, 0) if lost == 0 else (0, 1)), ended
    assert "killed by SIGKILL" in ended.err, ended
