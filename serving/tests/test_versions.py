"""Versions appear, are switched to and are unloaded while clients send requests."""

import asyncio
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import text_format
from tensorflow_serving.apis import model_management_pb2, prediction_log_pb2
from tensorflow_serving.config import model_server_config_pb2

from harness.serving import predict_request, serving
from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.model_config import ModelConfig
from keras_ddl.serving.model_manager import ModelManager, State

X = [[1.0, 2.0, 3.0]]


def publish(source, base, version):
    """Publishes a version atomically, like keras_ddl's exports."""
    staged = base / f".tmp-{version}"
    shutil.copytree(source, staged)
    staged.rename(base / str(version))


def switch_while_clients_ask(versions, base, requests, published):
    """Publishes versions in turn; returns the factors that clients saw, in order, and the number of failures."""
    publish(versions / "1", base, 1)
    with serving(base, "--poll-seconds", 0.1) as server:
        server.wait_for(1)
        seen, failed, done = [], [], threading.Event()

        def ask():
            while not done.is_set():
                try:
                    found = server.predictions.Predict(predict_request({"x": X}), timeout=120)
                    seen.append((found.model_spec.version.value, found))
                except grpc.RpcError as error:
                    failed.append(error)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for each in threads:
            each.start()
        for number in range(2, published + 2):
            wanted = len(seen) + requests // published
            while len(seen) < wanted:
                time.sleep(0.01)
            publish(versions / str((number - 1) % 3 + 1), base, number)
            server.wait_for(number)
        # Roll back: the bad version is moved away, as serving/docs/serving.md says.
        (base / str(published + 1)).rename(base / f"bad-{published + 1}")
        server.wait_for(published)
        wanted = len(seen) + 20
        while len(seen) < wanted:
            time.sleep(0.01)
        done.set()
        for each in threads:
            each.join()
        return server.predict(X), seen, failed


def check_switches(last, seen, failed, published):
    assert not failed, failed[:3]
    for version, answer in seen:
        # A version's factor is that of its weights, so no response came from a partly loaded version.
        expected = np.float32(X) * ((version - 1) % 3 + 1)
        np.testing.assert_array_equal(tf.make_ndarray(answer.outputs["y"]), expected)
    assert {version for version, _ in seen} >= set(range(1, published + 1))
    assert seen[-1][0] == published
    np.testing.assert_array_equal(last, np.float32(X) * ((published - 1) % 3 + 1))


def test_versions_are_switched_while_clients_send_requests(versions, tmp_path):
    check_switches(*switch_while_clients_ask(versions, tmp_path, 300, 2), 2)


@pytest.mark.long
def test_ten_thousand_requests_over_five_publications(versions, tmp_path):
    last, seen, failed = switch_while_clients_ask(versions, tmp_path, 10_000, 5)
    assert len(seen) >= 10_000
    check_switches(last, seen, failed, 5)


def test_version_that_cannot_be_loaded_leaves_the_previous_one(versions, tmp_path):
    publish(versions / "1", tmp_path, 1)
    with serving(tmp_path, "--poll-seconds", 0.1) as server:
        server.wait_for(1)
        (tmp_path / "2").mkdir()  # not complete yet: no graph
        (tmp_path / "notes").mkdir()
        shutil.copytree(versions / "2", tmp_path / ".tmp-4")
        (tmp_path / ".tmp-4" / "variables" / "variables.index").unlink()
        (tmp_path / ".tmp-4").rename(tmp_path / "4")
        state = None
        for _ in range(3000):
            _, answer = server.rest("GET", "/v1/models/model")
            state = {each["version"]: each["state"] for each in answer["model_version_status"]}
            if state.get("4") == "END":
                break
            time.sleep(0.1)
        assert state == {"4": "END", "1": "AVAILABLE"}, answer
        assert "not a valid checkpoint" in answer["model_version_status"][0]["status"]["error_message"]
        np.testing.assert_array_equal(server.predict(X), np.float32(X))
        shutil.copytree(versions / "3", tmp_path / ".tmp-5")
        requests = tmp_path / ".tmp-5" / "assets.extra" / "tf_serving_warmup_requests"
        requests.parent.mkdir()
        write_warm_up(requests, predict_request({"x": X}, signature="nothing"))
        (tmp_path / ".tmp-5").rename(tmp_path / "5")
        for _ in range(3000):
            _, answer = server.rest("GET", "/v1/models/model/versions/5")
            if answer.get("model_version_status", [{}])[0].get("state") == "END":
                break
            time.sleep(0.1)
        assert "Serving signature key" in answer["model_version_status"][0]["status"]["error_message"], answer
        write_warm_up(tmp_path / "5" / "assets.extra" / requests.name, predict_request({"x": X}))
        (tmp_path / "5").rename(tmp_path / "6")
        server.wait_for(6)
        np.testing.assert_array_equal(server.predict(X), 3 * np.float32(X))
        assert any("1 warm-up requests answered" in line for line in server.lines)


def write_warm_up(path, request):
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.CopyFrom(request)
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(log.SerializeToString())


CONFIG = """
model_config_list {
  config {
    name: "first" base_path: "%s" model_platform: "tensorflow"
    model_version_policy { specific { versions: 1 versions: 2 } }
    version_labels { key: "stable" value: 1 } version_labels { key: "canary" value: 2 }
  }
  config { name: "all" base_path: "%s" model_version_policy { all {} } }
}
"""


def test_config_file_with_models_versions_and_labels(versions, tmp_path):
    file = tmp_path / "models.config"
    file.write_text(CONFIG % (versions, versions))
    with serving("--model-config-file", file, "--allow-reload-config") as server:
        for version in (1, 2):
            server.wait_for(version, "first")
        for version in (1, 2, 3):
            server.wait_for(version, "all")
            np.testing.assert_array_equal(server.predict(X, "all", version=version), version * np.float32(X))
        np.testing.assert_array_equal(server.predict(X, "first"), 2 * np.float32(X))
        np.testing.assert_array_equal(server.predict(X, "first", label="stable"), np.float32(X))
        assert server.rest("POST", "/v1/models/first/labels/canary:predict", {"inputs": X})[0] == 200
        with pytest.raises(grpc.RpcError, match="Servable not found"):
            server.predict(X, "first", version=3)

        request = model_management_pb2.ReloadConfigRequest()
        config = text_format.Parse(CONFIG % (versions, versions), model_server_config_pb2.ModelServerConfig())
        first = config.model_config_list.config[0]
        first.version_labels["stable"] = 3  # a version that is not available
        request.config.CopyFrom(config)
        with pytest.raises(grpc.RpcError, match="cannot move to version 3"):
            server.models.HandleReloadConfigRequest(request)
        first.version_labels["stable"] = 2
        request.config.CopyFrom(config)
        del request.config.model_config_list.config[1]
        server.models.HandleReloadConfigRequest(request)
        np.testing.assert_array_equal(server.predict(X, "first", label="stable"), 2 * np.float32(X))
        with pytest.raises(grpc.RpcError, match="Servable not found"):
            server.predict(X, "all")


def test_requests_in_progress_at_shutdown_are_answered(versions, tmp_path):
    log = tmp_path / "access.log"
    with serving(versions, "--access-log", log, "--drain-seconds", 300) as server:
        server.wait_for(3)

        def work(rounds: int) -> Any:
            request = predict_request({"rounds": np.int32([rounds])}, signature="work")
            return server.predictions.Predict.future(request)

        work(1).result(300)
        begin = time.monotonic()
        work(1000).result(300)
        answer = work(round(4 * 1000 / (time.monotonic() - begin)))  # takes about 4 seconds
        time.sleep(0.5)
        assert not answer.done()
        assert server.end() == 0
        assert answer.result(300).model_spec.signature_name == "work"
        assert "stopping: 1 requests are running" in "".join(server.lines)
    line = [json.loads(line) for line in log.read_text().splitlines() if '"work"' in line][-1]
    assert (line["protocol"], line["method"], line["model"], line["version"]) == ("grpc", "Predict", "model", 3)
    assert line["status"] == "OK" and line["milliseconds"] > 500, line


async def load(config: ModelConfig, path: Path, version: int) -> Any:
    """Stands for a version's process."""
    return SimpleNamespace(path=path, version=version, error="", busy=0, close=lambda: True)


def test_stale_version_waits_only_for_its_last_request(tmp_path: Path) -> None:
    def add(number: int) -> None:
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "saved_model.pb").touch()

    async def serve() -> None:
        manager = ModelManager([ModelConfig("model", tmp_path)], load)
        add(1)
        await manager.poll()
        with manager.use("model") as servable:
            add(2)
            polling = asyncio.create_task(manager.poll())
            await asyncio.sleep(0.5)
            states = {each.number: each.state for each in manager.status("model")}
            assert servable.version == 1 and states == {2: State.AVAILABLE, 1: State.UNLOADING}
        await asyncio.wait_for(polling, 25)  # of the 30 seconds that it may drain
        states = {each.number: each.state for each in manager.status("model")}
        assert states == {2: State.AVAILABLE, 1: State.END}

    asyncio.run(serve())


@pytest.mark.parametrize("kind", ["circle", "FIFO", "device", "FIFO inside", "file"])
def test_unreadable_version_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    def add(number: int) -> Path:
        (tmp_path / str(number) / "variables").mkdir(parents=True)
        (tmp_path / str(number) / "saved_model.pb").touch()
        return tmp_path / str(number)

    def add_bad(number: int) -> None:
        if kind == "circle":
            (tmp_path / str(number)).symlink_to(str(number))
        elif kind == "file":
            (tmp_path / str(number)).touch()
        elif kind == "FIFO inside":
            os.mkfifo(add(number) / "variables" / "variables.index")
        else:
            graph = add(number) / "saved_model.pb"
            graph.unlink()
            os.mkfifo(graph) if kind == "FIFO" else graph.symlink_to("/dev/zero")

    async def load_unless_fifo(config: ModelConfig, path: Path, version: int) -> Any:
        if any(file.is_fifo() for file in path.rglob("*")):
            await asyncio.sleep(3600)  # TensorFlow would wait as long
        return await load(config, path, version)

    async def serve() -> None:
        manager = ModelManager([ModelConfig("model", tmp_path)], load_unless_fifo)
        add(7).rename(tmp_path / "007")  # names may have leading zeros
        if kind == "FIFO inside":  # found at loading, so it replaces no other version
            await manager.poll()
        add_bad(9)
        for _ in range(3):
            await asyncio.wait_for(manager.poll(), 60)
        with manager.use("model") as servable:
            assert servable.version == 7
        add(10**18)
        await asyncio.wait_for(manager.poll(), 60)
        with manager.use("model") as servable:
            assert servable.version == 10**18

    with caplog.at_level("WARNING"):
        asyncio.run(serve())
    said = [each.getMessage() for each in caplog.records if "9" in each.getMessage()]
    assert len(said) == (0 if kind == "file" else 1), said


def test_loaded_version_stays_if_its_directory_becomes_unreadable(tmp_path: Path) -> None:
    async def serve() -> None:
        manager = ModelManager([ModelConfig("model", tmp_path, latest=0)], load)
        for number in (1, 2):
            (tmp_path / str(number)).mkdir()
            (tmp_path / str(number) / "saved_model.pb").touch()
        await manager.poll()
        (tmp_path / "2" / "saved_model.pb").unlink()
        (tmp_path / "2" / "saved_model.pb").symlink_to("saved_model.pb")
        await manager.poll()
        assert {each.number: each.state for each in manager.status("model")} == dict.fromkeys((1, 2), State.AVAILABLE)

    asyncio.run(serve())
