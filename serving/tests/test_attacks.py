"""Attacks do not stop a server: health answers, memory is bounded, and the next request is answered."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from serving_attacks import ATTACKS, LIMIT, MEGABYTE, children_of, observed, p99, predict_seconds

from harness.serving import Running, predict_request, serving
from keras_ddl.compat.tensorflow import tf

HEALTH_SECONDS, PREDICT_SECONDS = 0.1, 1.0  # on two idle cores
BUSY = 30  # times longer at most while other tests run; a blocked server answers after minutes


@pytest.fixture(scope="module")
def attacked(versions: Path) -> Iterator[Running]:
    with serving(versions, "--max-memory-mb", LIMIT // MEGABYTE, "--timeout", 60, "--health-port", 0) as server:
        server.wait_for(3)
        predict_seconds(server)
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_server_withstands_attack(attacked: Running, name: str) -> None:
    with observed(attacked) as seen:
        ATTACKS[name](attacked)
    assert p99(seen.health) < BUSY * HEALTH_SECONDS, sorted(seen.health)[-5:]
    assert p99(seen.rest) < BUSY * HEALTH_SECONDS, sorted(seen.rest)[-5:]
    assert seen.peak < LIMIT + 64 * MEGABYTE, seen.peak / MEGABYTE
    assert seen.predict < BUSY * PREDICT_SECONDS, (seen.predict, attacked.lines)
    assert not any("Traceback" in line for line in attacked.lines), attacked.lines


def model_process_of(server: Running) -> int:
    """Returns the process that computes, the youngest one."""
    return max(children_of(server.process.pid), key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().split()[21]))


def test_dead_process_is_replaced_and_only_its_killer_is_refused(attacked: Running) -> None:
    work = predict_request({"rounds": np.int32([3000])}, signature="work")
    answers = [attacked.predictions.Predict.future(work, timeout=120) for _ in range(6)]
    time.sleep(0.1)
    os.kill(model_process_of(attacked), signal.SIGSEGV)
    assert [each.result().model_spec.version.value for each in answers] == [3] * 6
    assert predict_seconds(attacked) < BUSY * PREDICT_SECONDS


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serves a model that ends its process on certain requests."""
    folder = tmp_path_factory.mktemp("fragile")

    kernel, bias = tf.Variable(tf.ones([3, 3, 1, 2])), tf.Variable(tf.ones([2]))

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 1], tf.float32, "image")])
    def convolve(image):
        return {"y": tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(image, kernel, 1, "VALID"), bias))}

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32, "rows")])
    def grow(rows):
        text = tf.fill([rows], tf.strings.reduce_join(tf.fill([1000], "x")))  # each row is a separate copy
        return {"y": tf.reduce_max(tf.strings.length(text))}

    module = tf.Module()
    module.grow, module.convolve, module.variables_ = grow, convolve, [kernel, bias]
    signatures = {"serving_default": grow.get_concrete_function(), "image": convolve.get_concrete_function()}
    tf.saved_model.save(module, str(folder / "1"), signatures)
    with serving(folder, "--max-memory-mb", 100, "--threads", 2) as server:
        server.wait_for(1)
        yield server


def test_only_the_request_that_ends_its_process_is_refused(fragile: Running) -> None:
    """The memory of strings is not allocated through TensorFlow's allocator, which would return an error."""
    refused, answered = [], []

    def ask(rows: int) -> None:
        try:
            request = predict_request({"rows": np.int32(rows)})
            answered.append(int(tf.make_ndarray(fragile.predictions.Predict(request, timeout=120).outputs["y"])))
        except grpc.RpcError as error:
            refused.append(error)

    threads = [threading.Thread(target=ask, args=(rows,)) for rows in (10, 10_000_000, 10, 10, 10)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert answered == [1000] * 4
    assert [each.code() for each in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED], refused
    assert fragile.rest("POST", "/v1/models/model:predict", {"inputs": 10_000_000})[0] in (429, 503)
    assert fragile.rest("POST", "/v1/models/model:predict", {"inputs": 10}) == (200, {"outputs": 1000})


def test_rank_on_which_tensorflow_would_abort_is_refused(fragile: Running) -> None:
    process = model_process_of(fragile)
    for instances in ([[1.0, 2.0, 3.0]], [1.0], [[[[1.0]]]]):
        received = list(np.shape(instances))
        said = f"Input 'image' of signature 'image' must have shape [None, 8, 8, 1]. Received: {received}."
        for values in ({"instances": instances}, {"inputs": instances}, {"inputs": {"image": instances}}):
            body = {"signature_name": "image", **values}
            assert fragile.rest("POST", "/v1/models/model:predict", body) == (400, {"error": said})
        with pytest.raises(grpc.RpcError) as caught:
            fragile.predictions.Predict(predict_request({"image": np.float32(instances)}, signature="image"))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, said)
    assert model_process_of(fragile) == process


def test_clients_cannot_call_the_loaders_operation(attacked: Running) -> None:
    for name in ("__saved_model_init_op",):
        with pytest.raises(grpc.RpcError, match="not found") as caught:
            attacked.predictions.Predict(predict_request({}, signature=name))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        status, answer = attacked.rest("POST", "/v1/models/model:predict", {"signature_name": name, "inputs": {}})
        assert status == 400 and "init_op" not in answer["error"].partition("There are")[2], answer


def test_killed_server_leaves_nothing_behind(versions: Path) -> None:
    with serving(versions) as server:
        server.wait_for(3)
        server.predictions.Predict.future(predict_request({"rounds": np.int32([10**9])}, signature="work"), timeout=60)
        time.sleep(0.3)
        pids = children_of(server.process.pid)
        assert len(pids) >= 3
        server.process.kill()
        for _ in range(1200):
            left = [
                pid
                for pid in pids
                if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            if not left:
                break
            time.sleep(0.1)
        assert not left
