"""TensorFlow's own saved_model_cli reads and runs exports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from export_zoo import ZOO, disturb

from keras_ddl import export, model_state

TOOL = Path(sys.executable).with_name("saved_model_cli")


def run(*arguments: str | Path) -> str:
    command = [str(part) for part in (TOOL, *arguments)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_saved_model_cli_shows_and_runs_an_export(tmp_path: Path) -> None:
    model, sample = ZOO["sequential_cnn"]()
    base = export.write_base_graph(model, tmp_path / "ckpt", sample=sample)
    disturb(model)
    model_state.save_checkpoint(model, tmp_path / "ckpt", 1, base=base)
    path = export.export_saved_model(tmp_path / "ckpt", tmp_path / "out", validate="off").path

    shown = run("show", "--dir", path, "--all")
    serving = shown.partition("signature_def['serving_default']")[2].partition("Method name is:")
    assert "inputs['inputs'] tensor_info:\n        dtype: DT_FLOAT\n        shape: (-1, 8, 8, 1)" in serving[0], shown
    assert "outputs['output_0'] tensor_info:\n        dtype: DT_FLOAT\n        shape: (-1, 3)" in serving[0], shown
    assert serving[2].startswith(" tensorflow/serving/predict")

    np.save(tmp_path / "rows.npy", sample[:3])
    rows = ("--inputs", f"inputs={tmp_path / 'rows.npy'}", "--outdir", tmp_path)
    run("run", "--dir", path, "--tag_set", "serve", "--signature_def", "serving_default", *rows)
    np.testing.assert_allclose(np.load(tmp_path / "output_0.npy"), model(sample[:3], training=False), atol=1e-6)

    assert "does not contain the default denylisted ops" in run("scan", "--dir", path, "--tag_set", "serve")
