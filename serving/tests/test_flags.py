"""TensorFlow Serving's flags: each works, is refused with a reason, or is reported to have no effect."""

from __future__ import annotations

import shutil
import time
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from tensorflow_serving.apis import prediction_service_pb2_grpc

from harness.serving import Running, predict_request, serving
from keras_ddl.serving import flags
from keras_ddl.serving.flags import FLAGS, Support
from keras_ddl.serving.serve_command import command

DOCS = Path(__file__).parents[1] / "docs" / "serving.md"
X = np.ones([2, 3], np.float32)
FOR_PRODUCTION = "TensorFlow Serving is the server for production"


def test_docs_table_matches_the_flags() -> None:
    assert flags.markdown() in DOCS.read_text(), "write flags.markdown() into serving/docs/serving.md"


def test_values_use_the_units_in_flag_names() -> None:
    units = {"_in_ms": 1e-3, "_micros": 1e-6}
    for flag in FLAGS:
        assert flag.scale == next((unit for end, unit in units.items() if flag.name.endswith(end)), 1.0), flag.name


@pytest.mark.parametrize(
    "flag", [each for each in FLAGS if each.support is Support.REFUSED], ids=lambda flag: flag.name
)
def test_unsupported_flag_is_refused_with_the_reason(flag: flags.Flag, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(command, [str(tmp_path), f"--{flag.name}={'true' if flag.kind is bool else '1'}"])
    assert flag.note in str(outcome.exception), outcome.output
    assert flag.name in str(outcome.exception)


def test_all_flags_together_start_a_server(versions: Path, tmp_path: Path) -> None:
    (tmp_path / "monitoring").write_text('prometheus_config { enable: true path: "/metrics" }')
    values = {
        "grpc_socket_path": tmp_path / "socket",
        "batching_parameters_file": tmp_path / "batching",
        "model_name": "model",
        "model_base_path": versions,
        "saved_model_tags": "serve",
        "grpc_channel_arguments": "grpc.max_connection_age_ms=60000,grpc.primary_user_agent=test",
        "monitoring_config_file": tmp_path / "monitoring",
        "per_process_gpu_memory_fraction": "0.5",
        "rest_api_timeout_in_ms": "20000",
        "load_retry_interval_micros": "1000000",
    }
    without_value = "rest_api_enable_cors_support"
    apart = {"model_config_file", "model_config_file_poll_wait_seconds", "port", "rest_api_port", without_value}
    taken = [flag for flag in FLAGS if flag.support is not Support.REFUSED and flag.name not in apart]
    both = [f"--{flag.name}={values.get(flag.name, 'true' if flag.kind is bool else '2')}" for flag in taken]
    with serving(*both, f"--{without_value}") as server:
        server.wait_for(3)
        np.testing.assert_array_equal(server.predict(X), 3 * X)
        with grpc.insecure_channel(f"unix:{tmp_path / 'socket'}") as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            assert stub.Predict(predict_request({"x": X})).outputs["y"].tensor_content  # as requested by the flag
        status, text = server.rest("GET", "/metrics")
        assert status == 200 and ":tensorflow:serving:request_count{" in text
        url = f"http://127.0.0.1:{server.rest_port}/v1/models/model"
        for method in ("OPTIONS", "GET"):
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
                assert answer.headers["Access-Control-Allow-Origin"] == "*"
        said = "".join(server.lines)
        assert FOR_PRODUCTION not in said
        for flag in FLAGS:
            assert (f"--{flag.name} has no effect here" in said) == (flag.support is Support.NO_EFFECT), flag


def test_server_open_to_others_recommends_tensorflow_serving_for_production(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0") as server:
        server.end()
    (notice,) = [line for line in server.lines if FOR_PRODUCTION in line]
    assert "0.0.0.0" in notice


def test_server_is_closed_to_others_by_default() -> None:
    (host,) = [parameter.default for parameter in command.params if parameter.name == "host"]
    assert host == "127.0.0.1"


def test_config_file_is_followed_and_an_invalid_one_changes_nothing(versions: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.config"
    one = 'config {{ name: "{}" base_path: "{}" model_platform: "tensorflow" }}'
    file.write_text(f"model_config_list {{ {one.format('first', versions)} }}")
    with serving("--model_config_file", file, "--model_config_file_poll_wait_seconds=0.2") as server:
        server.wait_for(3, "first")
        file.write_text("this is no config")
        _wait_for_line(server, "Error parsing")
        file.write_text("")
        _wait_for_line(server, "It must name a model")
        np.testing.assert_array_equal(server.predict(X, "first"), 3 * X)
        file.write_text(f"model_config_list {{ {one.format('first', versions)} {one.format('second', versions)} }}")
        server.wait_for(3, "second")
        np.testing.assert_array_equal(server.predict(X, "second"), 3 * X)


def test_label_moves_when_its_version_becomes_available(versions: Path, tmp_path: Path) -> None:
    file, model = tmp_path / "models.config", tmp_path / "model"
    shutil.copytree(versions / "1", model / "1")
    text = (
        f'model_config_list {{ config {{ name: "one" base_path: "{model}" model_platform: "tensorflow" '
        'model_version_policy { all {} } version_labels { key: "stable" value: %d } } }'
    )
    file.write_text(text % 1)
    poll = ["--model_config_file_poll_wait_seconds=0.1", "--file_system_poll_wait_seconds=0.1"]
    with serving("--model_config_file", file, *poll) as server:
        server.wait_for(1, "one")
        file.write_text(text % 2)
        _wait_for_line(server, "cannot move to version 2")
        np.testing.assert_array_equal(server.predict(X, "one", label="stable"), X)
        shutil.copytree(versions / "2", tmp_path / "2")
        (tmp_path / "2").rename(model / "2")
        server.wait_for(2, "one")
        deadline = time.monotonic() + 300
        while server.predict(X, "one", label="stable")[0, 0] != 2:
            assert time.monotonic() < deadline, server.lines
            time.sleep(0.05)
        assert sum("cannot move to version 2" in line for line in server.lines) == 1


def _wait_for_line(server: Running, text: str) -> None:
    for _ in range(3000):
        if any(text in line for line in server.lines):
            return
        time.sleep(0.1)
    raise AssertionError(server.lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--enable_batching=perhaps"], "not a valid boolean"),
        (["--monitoring_config_file=none"], "must hold a MonitoringConfig"),
        (["--grpc_channel_arguments=one"], "NAME=VALUE"),
    ],
)
def test_invalid_value_is_refused(arguments: list[str], said: str, versions: Path) -> None:
    outcome = CliRunner().invoke(command, [str(versions), "--port=0", "--rest-port=0", *arguments])
    assert outcome.exit_code != 0 and said in f"{outcome.output}{outcome.exception}", outcome.output
