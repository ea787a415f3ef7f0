"""A server that follows a training, which publishes versions and is killed."""

import asyncio
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import grpc
import numpy as np
import pytest

from harness import leftovers
from harness.serving import predict_request, serving
from keras_ddl import checkpoint
from keras_ddl.compat.tensorflow import tf
from keras_ddl.files import durable
from keras_ddl.serving.model_config import ModelConfig
from keras_ddl.serving.model_manager import ModelManager
from keras_ddl.serving.protocol.status import Code, RequestError

PROGRAM = Path(__file__).with_name("following_training.py")
X = np.float32([[1, 2, 3], [0.5, 0, -1]])


def train(folder, epochs, resume, mark):
    command = [Path(sys.executable).with_name("keras-ddl"), "run", "-np", 2, sys.executable, PROGRAM]
    return subprocess.Popen(
        [str(word) for word in [*command, folder, epochs, resume]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, leftovers.MARK: mark, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )


class Client:
    """Sends requests all the time, and records each response, its version, and whether training was running."""

    def __init__(self, server, is_training):
        self.seen, self.failed = [], []
        self._server, self._is_training = server, is_training
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._done.set()
        self._thread.join()

    def _run(self):
        while not self._done.is_set():
            try:
                found = self._server.predictions.Predict(predict_request({"x": X}), timeout=120)
            except grpc.RpcError as error:
                self.failed.append(error)
            else:
                answer = tf.make_ndarray(found.outputs["y"])
                self.seen.append((found.model_spec.version.value, answer, self._is_training()))
            time.sleep(0.005)  # leaves the cores to training


def expected(folder, step):
    """Returns the outputs for that step's weights, from the checkpoint that the version was exported from."""
    reader = tf.train.load_checkpoint(str(folder / "ckpt" / f"ckpt-{step:08d}" / "weights"))
    arrays = [reader.get_tensor(key) for key, shape in reader.get_variable_to_shape_map().items() if key != "_C"]
    (kernel,) = [each for each in arrays if each.shape == (3, 2)]
    (bias,) = [each for each in arrays if each.shape == (2,)]
    return X @ kernel + bias


def check_answers(folder, seen):
    """Checks that every output is that of the reported version, and that versions only increase."""
    versions = [version for version, _, _ in seen]
    assert versions == sorted(versions)
    answers = {version: expected(folder, version) for version in set(versions)}
    for version, answer, _ in seen:
        np.testing.assert_allclose(answer, answers[version], rtol=1e-5, atol=1e-6)
    rest = sorted(answers)
    for one, other in zip(rest, rest[1:]):  # no two versions give equal outputs
        assert np.abs(answers[one] - answers[other]).max() > 1e-4


def hidden(folder):
    return [entry.name for name in ("ckpt", "served") for entry in (folder / name).iterdir() if entry.name[0] == "."]


@pytest.mark.long
def test_server_follows_a_training_that_is_killed_and_resumed(tmp_path):
    served, mark = tmp_path / "served", uuid.uuid4().hex
    served.mkdir()
    with serving(served, "--poll-seconds", 0.1) as server:
        training = train(tmp_path, 1000, "new", mark)
        try:
            wait_until(lambda: server.rest("GET", "/readyz")[0] == 200, training)
            assert sum("no version to serve yet" in line for line in server.lines) == 1, server.lines
            with Client(server, lambda: training.poll() is None) as client:
                wait_until(lambda: len({version for version, _, _ in client.seen}) >= 3, training)
                # Killed while a version is being written, including the exporting process.
                wait_until(lambda: list(served.glob(".tmp-*")), training)
                killed = leftovers.end_all(mark, grace=0)
                training.wait()
                assert len(killed) >= 4, killed  # the launcher, two ranks, the export
                last = len(client.seen)
                wait_until(lambda: len(client.seen) > last + 200)
            assert not client.failed, client.failed[:3]
            check_answers(tmp_path, client.seen)
            during = {version for version, _, training_runs in client.seen if training_runs}
            assert len(during) >= 3
            before = client.seen[-1][0]
            assert {version for version, _, _ in client.seen[last:]} <= {before, max(during)}
            assert [name for name in hidden(tmp_path) if name.startswith(".tmp-")]

            epochs = checkpoint.latest(tmp_path / "ckpt").step // 8 + 20
            training = train(tmp_path, epochs, "resume", mark)
            with Client(server, lambda: training.poll() is None) as client:
                output = training.communicate(timeout=1200)[0]
                assert training.returncode == 0, output
                wait_until(lambda: client.seen and client.seen[-1][0] == 8 * epochs)
            assert not client.failed, client.failed[:3]
            check_answers(tmp_path, client.seen)
            assert hidden(tmp_path) == []
            assert [int(entry.name) for entry in served.iterdir()] == [8 * epochs]
        finally:
            leftovers.end_all(mark, grace=0)


def wait_until(happens, process=None, seconds=300):
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.stdout.read()
        time.sleep(0.01)


def test_version_being_read_is_not_removed(tmp_path):
    (tmp_path / "1").mkdir()
    with durable.being_read(tmp_path / "1"), durable.being_read(tmp_path / "1"):
        assert not durable.remove_unless_read(tmp_path / "1") and (tmp_path / "1").is_dir()
    assert durable.remove_unless_read(tmp_path / "1") and not (tmp_path / "1").exists()
    assert durable.remove_unless_read(tmp_path / "1")  # already removed
    with durable.being_read(tmp_path / "1"):
        pass


def test_version_is_locked_while_it_is_loaded(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").touch()
    removed = []

    async def load(config, path, number):
        removed.append(durable.remove_unless_read(path))
        raise ValueError("no model")

    async def poll():
        await ModelManager([ModelConfig("model", tmp_path)], load).poll()

    asyncio.run(poll())
    assert removed == [False]
    assert durable.remove_unless_read(tmp_path / "1")


def test_requests_before_the_first_load_get_unavailable(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").touch()
    seen = []

    async def load(config, path, number):
        seen.append([code("model"), code("other")])
        raise ValueError("no model")

    def code(name):
        with pytest.raises(RequestError) as error, models.use(name):
            pass
        return error.value.code

    async def poll():
        await models.poll()
        seen.append([code("model"), code("other")])

    models = ModelManager([ModelConfig("model", tmp_path)], load)
    asyncio.run(poll())
    assert seen == [[Code.UNAVAILABLE, Code.NOT_FOUND], [Code.NOT_FOUND, Code.NOT_FOUND]]
