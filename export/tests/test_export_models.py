"""Models of all kinds: traced in training, exported without Keras, served without keras_ddl, with equal outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from export_helpers import ask
from export_zoo import ZOO, disturb
from tensorflow_serving.apis import prediction_log_pb2

from keras_ddl import checkpoint, export, model_state
from keras_ddl.errors import ExportError
from keras_ddl.export.inference.isolation import layers_of
from keras_ddl.export.proof import validate

HERE = Path(__file__).parent


def run_program(name: str, *arguments: Path) -> dict[str, Any]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-P", HERE / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("results:"))
    return json.loads(line.removeprefix("results:"))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Traces each model, changes its weights, saves a checkpoint and the live outputs; exports and serves."""
    root = tmp_path_factory.mktemp("zoo")
    records = {}
    for name, make in ZOO.items():
        model, sample = make()
        model(sample, training=False)
        base = export.write_base_graph(model, root / "ckpt" / name, sample=sample)
        disturb(model)
        model_state.save_checkpoint(model, root / "ckpt" / name, 7, 1, {"loss": 0.5}, base=base)
        expected = base.golden()
        live = base.evidence()[1]
        (root / "rows" / name).mkdir(parents=True)
        with np.load(base.path / "sample.npz") as rows:
            np.savez(root / "rows" / name / "rows.npz", **{key: rows[key] for key in rows.files})
        kept = {key: value for key, value in expected.items() if key not in base.record["random"]}
        np.savez(root / "rows" / name / "expected.npz", **kept)
        assert not [layer for layer in layers_of(model) if "call" in vars(layer)], "the trace left a layer changed"
        records[name] = {"record": base.record, "warnings": base.warnings, "live": live}
    exported = run_program("export_program.py", root / "ckpt", root / "out")
    served = run_program("serve_program.py", root / "rows", root / "out")
    return {"root": root, "records": records, "exported": exported, "served": served}


@pytest.mark.parametrize("name", ZOO)
def test_export_gives_outputs_of_the_trained_model(zoo: dict[str, Any], name: str) -> None:
    tolerance = validate.HALF_TOLERANCE if zoo["records"][name]["record"]["half"] else validate.TOLERANCE
    assert zoo["served"]["largest"][name] <= tolerance
    assert zoo["exported"][name]["step"] == 7
    assert "as the trained model did" in zoo["exported"][name]["proof"]
    assert zoo["records"][name]["live"]["agrees"], "the live model and the base graph differ"


@pytest.mark.parametrize("name", ["functional_dicts", "subclassed", "lstm_with_mask", "model_in_model"])
def test_every_listed_layer_can_be_served(zoo: dict[str, Any], name: str, tmp_path: Path) -> None:
    names = list(zoo["records"][name]["record"]["layers"])
    assert names
    folder = zoo["root"] / "ckpt" / name
    path = export.export_saved_model(folder, tmp_path, validate="off", signatures={"all": names}).path
    with np.load(zoo["root"] / "rows" / name / "rows.npz") as archive:
        assert set(ask(path, "all", **dict(archive))) == set(names)


def test_server_process_imports_neither_keras_nor_keras_ddl(zoo: dict[str, Any]) -> None:
    assert zoo["served"]["imported"] == []


def test_export_has_stable_names(zoo: dict[str, Any]) -> None:
    names = {
        name: (list(each["record"]["inputs"]), list(each["record"]["outputs"])) for name, each in zoo["records"].items()
    }
    assert names["sequential_cnn"] == (["inputs"], ["output_0"])
    assert names["functional_lists"] == (["inputs_0", "some_second_input"], ["sum", "output_1"])
    assert sorted(names["functional_dicts"][0]) == ["deep", "wide"]
    assert sorted(names["functional_dicts"][1]) == ["kind", "score"]
    assert names["subclassed"][0] == ["x"]
    assert names["subclassed_dicts"] == (["bias", "ids"], ["answer"])
    assert names["preprocessing"] == (["text", "color", "number"], ["price"])


def test_export_returns_float32_from_mixed_precision(zoo: dict[str, Any]) -> None:
    assert zoo["records"]["mixed_precision"]["record"]["outputs"] == {"output_0": ["float32", [None, 3]]}
    assert zoo["records"]["mixed_precision"]["record"]["half"]


def test_export_knows_which_outputs_are_random(zoo: dict[str, Any]) -> None:
    assert zoo["records"]["sampler"]["record"]["random"] == ["noise"]
    assert any("does not track" in sentence for sentence in zoo["records"]["sampler"]["warnings"])


def test_export_holds_each_weight_once(zoo: dict[str, Any]) -> None:
    folder = zoo["root"] / "out" / "sequential_cnn" / "1"
    held = [name for name, _ in tf.train.list_variables(str(folder / "variables" / "variables"))]
    assert len([name for name in held if "conv2d" in name]) == 2
    assert not [name for name in held if "optimizer" in name or "static" in name]
    assert (folder / "fingerprint.pb").exists() and (folder / "assets").is_dir()


def test_export_graph_is_the_base_graph_byte_for_byte(zoo: dict[str, Any]) -> None:
    for name in ZOO:
        base = zoo["root"] / "ckpt" / name / "base" / "saved_model.pb"
        assert base.read_bytes() == (zoo["root"] / "out" / name / "1" / "saved_model.pb").read_bytes()


def test_export_holds_the_weights_of_the_checkpoint_byte_for_byte(zoo: dict[str, Any]) -> None:
    compared = 0
    for name in ZOO:
        saved = tf.train.load_checkpoint(str(zoo["root"] / "ckpt" / name / "ckpt-00000007" / "weights"))
        exported = tf.train.load_checkpoint(str(zoo["root"] / "out" / name / "1" / "variables" / "variables"))
        for key in zoo["records"][name]["record"]["captured"]:
            assert exported.get_tensor(key).tobytes() == saved.get_tensor(key).tobytes(), (name, key)
            compared += 1
    assert compared > len(ZOO)


def test_export_graph_runs_lstm_without_cudnn_and_names_no_device(zoo: dict[str, Any]) -> None:
    report = export.scan_saved_model(zoo["root"] / "out" / "lstm_with_mask" / "1")
    assert report.problems == () and report.warnings == ()
    assert not [op for op in report.ops if "Cudnn" in op]


def test_export_stores_warmup_request_and_origin(zoo: dict[str, Any]) -> None:
    extra = zoo["root"] / "out" / "functional_dicts" / "1" / "assets.extra"
    origin = json.loads((extra / "keras_ddl_export.json").read_text())
    assert origin["step"] == 7 and origin["metrics"] == {"loss": 0.5} and origin["checkpoint"] == "ckpt-00000007"
    (record,) = tf.data.TFRecordDataset(str(extra / "tf_serving_warmup_requests")).as_numpy_iterator()
    request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
    assert request.model_spec.name == "functional_dicts" and request.model_spec.signature_name == "serving_default"
    with np.load(zoo["root"] / "rows" / "functional_dicts" / "rows.npz") as rows:
        assert set(request.inputs) == set(rows.files)
        for key in rows.files:
            np.testing.assert_array_equal(tf.make_ndarray(request.inputs[key]), rows[key])


def test_second_export_takes_the_next_version_and_keeps_the_first(zoo: dict[str, Any]) -> None:
    out = zoo["root"] / "out" / "sequential_cnn"
    before = (out / "1" / "variables" / "variables.index").read_bytes()
    result = export.export_saved_model(zoo["root"] / "ckpt" / "sequential_cnn", out, validate="process")
    assert result.version == 2 and result.path == out / "2"
    assert "in a clean process as the trained model did" in result.proof
    assert list(result.seconds) == ["import tensorflow", "check files", "copy weights", "validate", "publish"]
    assert (out / "1" / "variables" / "variables.index").read_bytes() == before
    assert [entry.name for entry in out.iterdir() if entry.name.startswith(".")] == []
    by_step = export.export_saved_model(zoo["root"] / "ckpt" / "sequential_cnn", out, version="step", validate="off")
    assert by_step.version == 7


def test_base_graph_in_used_directory_is_replaced_only_by_the_same_model(zoo: dict[str, Any], tmp_path: Path) -> None:
    model, sample = ZOO[
        "sequential_cnn"
    ]()  # Keras numbers its layers anew, so the keys differ although the model does not
    base = export.write_base_graph(model, tmp_path, sample=sample)
    model_state.save_checkpoint(model, tmp_path, 1, base=base)
    again, sample = ZOO["sequential_cnn"]()
    export.write_base_graph(again, tmp_path, sample=sample)
    assert "as the trained model did" in export.export_saved_model(tmp_path, tmp_path / "out", validate="here").proof
    other, sample = ZOO["mixed_precision"]()
    with pytest.raises(ExportError, match="hold only one model.*set_aside"):
        export.write_base_graph(other, tmp_path, sample=sample)
    assert checkpoint.set_aside(tmp_path) == tmp_path / "previous-1"
    export.write_base_graph(other, tmp_path, sample=sample)
    result = export.export_saved_model(tmp_path / "previous-1", tmp_path / "o", validate="here")
    assert "as the trained model did" in result.proof
