"""`keras-ddl export --check`, which checks any SavedModel."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from harness.commands import keras_ddl
from keras_ddl import export
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ExportError


def write_model(path: Path, call) -> Path:
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.factor = tf.Variable(2.0)

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x"), tf.TensorSpec([None], tf.string, "t")])
        def serve(self, x, t):
            return call(self.factor, x, t)

    model = Model()
    tf.saved_model.save(model, str(path), {"serving_default": model.serve})
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checked") / "3"
    return write_model(path, lambda factor, x, t: {"y": factor * x, "upper": tf.strings.upper(t)})


def test_check_prints_its_report_and_writes_text_and_json(good, tmp_path):
    version = Path(shutil.copytree(good, tmp_path / "3"))
    shown = keras_ddl("export", "--check", version, status=0)
    assert f"{version}: can be served" in shown
    assert (
        "signature serving_default: t string[None], x float32[None, 3] -> upper string[None], y float32[None, 3]"
        in shown
    )
    assert "answers: 2 rows, made up (zeros), with upper, y" in shown
    assert (tmp_path / "3.check.txt").read_text() in shown
    report = json.loads((tmp_path / "3.check.json").read_text())
    assert report["problems"] == [] and report["ops"]["StringUpper"] == 1 and report["seconds"]["load"] > 0
    assert sorted(entry.name for entry in version.iterdir()) == sorted(entry.name for entry in good.iterdir())


def test_check_runs_given_rows(good, tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.ones([4, 3], np.float32), t=np.array([b"a"] * 4))
    assert export.check_saved_model(good, sample=tmp_path / "rows.npz").answers.startswith("4 rows")


def test_check_rejects_bad_sample(good, tmp_path):
    file, text = tmp_path / "rows.npz", np.array([b"a"] * 4)
    with pytest.raises(ExportError, match="rows.npz: .*No such file"):
        export.check_saved_model(good, sample=file)
    for content in (b"", b"junk", b"PK\3\4 cut short"):
        file.write_bytes(content)
        with pytest.raises(ExportError, match="an .npz file with rows for each input.*Received: .*rows.npz: "):
            export.check_saved_model(good, sample=file)
    np.save(tmp_path / "rows.npy", text)
    with pytest.raises(ExportError, match="rows.npy holds one array"):
        export.check_saved_model(good, sample=tmp_path / "rows.npy")
    for x in ({}, {"x": np.ones([4, 2], np.float32)}, {"x": np.ones([4, 3], np.float32), "more": text}):
        np.savez(file, t=text, **x)
        with pytest.raises(
            ExportError, match=r"with .*t \|S1\[4\].*; the inputs are t string\[None\], x float32\[None, 3\]"
        ):
            export.check_saved_model(good, sample=file)


def test_check_prints_report_that_it_cannot_write(good, tmp_path):
    version = Path(shutil.copytree(good, tmp_path / "3"))
    (tmp_path / "3.check.txt").mkdir()
    shown = keras_ddl("export", "--check", version, status=0)
    assert f"{version}: can be served" in shown and "not written: [Errno 21] Is a directory" in shown


def test_check_reports_what_no_server_runs(good, tmp_path):
    calls_back = lambda factor, x, t: {"y": tf.ensure_shape(tf.numpy_function(np.sin, [x], tf.float32), x.shape)}  # noqa: E731
    shown = keras_ddl("export", "--check", write_model(tmp_path / "1", calls_back), status=1)
    assert "1: cannot be served" in shown and "problem: Python callback PyFunc" in shown, shown
    halved = Path(shutil.copytree(good, tmp_path / "2"))
    (halved / "variables" / "variables.index").unlink()
    (problem,) = export.check_saved_model(halved).problems
    assert "Could not find variable" in problem  # as on a server, whose C++ code loads the same files
    with pytest.raises(ExportError, match=r"must hold saved_model.pb.*Give one of its versions: .*/2\."):
        export.check_saved_model(tmp_path)


def test_export_takes_either_a_checkpoint_or_a_version_to_check(tmp_path):
    for arguments in ([], ["ckpt"], ["ckpt", "out", "--check", "3"], ["ckpt", "out", "--sample", "rows.npz"]):
        assert "Give CHECKPOINTS and OUTPUT, or --check VERSION" in keras_ddl("export", *arguments, status=2)
