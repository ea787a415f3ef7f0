"""Models of more than 2 GB, the limit of protocol buffers, in one variable and in many."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_ddl
from harness.serving import serving
from keras_ddl import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.alone]

PARAMETERS = 565_000_000  # 2.26 GB of float32
WIDTH = 500


def in_one_variable() -> Any:
    ids = keras.Input((4,), dtype="int32", name="ids")
    table = layers.Embedding(PARAMETERS // WIDTH, WIDTH, embeddings_initializer="ones")(ids)
    return keras.Model(ids, layers.Dense(2, name="y")(layers.GlobalAveragePooling1D()(table)))


def in_many() -> Any:
    ids = keras.Input((4,), dtype="int32", name="ids")
    tables = [layers.Embedding(PARAMETERS // WIDTH // 20, WIDTH, embeddings_initializer="ones") for _ in range(20)]
    joined = layers.add([layers.GlobalAveragePooling1D()(table(ids)) for table in tables])
    return keras.Model(ids, layers.Dense(2, name="y")(joined))


@pytest.mark.parametrize("make", [in_one_variable, in_many])
def test_models_above_two_gigabytes_are_exported_and_served(make: Any, tmp_path: Path) -> None:
    rows = np.array([[0, 1, 2, 3], [4, 5, 6, 7]], np.int32)
    with keras_ddl.Strategy().scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    keep = [
        keras_ddl.callbacks.Checkpoint(tmp_path / "ckpt", monitor="loss"),
        keras_ddl.callbacks.ExportBase(sample=rows),
    ]
    model.fit(rows, np.ones([2, 2]), batch_size=2, epochs=1, verbose=0, callbacks=keep)
    expected = model.predict(rows, verbose=0)
    del model, keep
    (saved,) = checkpoint.list_checkpoints(tmp_path / "ckpt")
    size = sum(file.stat().st_size for file in saved.path.iterdir())
    assert size > 2.2e9
    assert sum(file.stat().st_size for file in (tmp_path / "ckpt" / "base").rglob("*") if file.is_file()) < 1e6

    program = Path(__file__).with_name("large_export.py")
    command = [sys.executable, str(program), str(tmp_path / "ckpt"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.rpartition("result:")[2])
    print(result)
    assert "2 rows in a clean process as the trained model did" in result["proved"]
    assert result["bytes"] > 2.2e9
    parts = [name for name in result["files"] if ".data-" in name]
    if make is in_many:
        assert len(parts) == 5 and parts[0] == "variables.data-00000-of-00005"
        assert result["own"] < 0.4 * size, result
    else:
        assert result["own"] < 1.2 * size, result
    assert result["proof"] < 1.4 * size, result
    shutil.rmtree(tmp_path / "ckpt")
    answers_of_a_server(tmp_path / "out", rows, expected)


def answers_of_a_server(folder: Path, rows: np.ndarray, expected: np.ndarray) -> None:
    with serving(folder) as server:
        server.wait_for(1)
        status, answer = server.rest("POST", "/v1/models/model:predict", {"instances": rows.tolist()})
    assert status == 200, answer
    np.testing.assert_allclose(answer["predictions"], expected, rtol=1e-5)
