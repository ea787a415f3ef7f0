"""Starts `keras-ddl serve` for tests, and writes the models to serve."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tensorflow_serving.apis import (
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from keras_ddl.compat.tensorflow import tf

COMMAND = Path(sys.executable).with_name("keras-ddl")
LABELS = ["even", "odd", "none"]


def write_model(path: Path, factor: float) -> None:
    """Writes a SavedModel: `serving_default` multiplies x by `factor`; `pair` has two inputs, one of them text;
    `classify` and `regress` parse examples; `work` computes for a given number of rounds.
    """

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = tf.Variable(factor)

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "x")])
        def scale(self, x):
            return {"y": self.factor * x, "total": tf.reduce_sum(x, 1)}

        @tf.function(
            input_signature=[tf.TensorSpec([None], tf.int64, "number"), tf.TensorSpec([None], tf.string, "text")]
        )
        def pair(self, number, text):
            return {"text": tf.strings.join([text, tf.strings.as_string(number)]), "raw_bytes": text}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "inputs")])
        def classify(self, inputs):
            x = tf.io.parse_example(inputs, {"x": tf.io.FixedLenFeature([3], tf.float32)})["x"]
            return {"scores": x * self.factor, "classes": tf.tile([LABELS], [tf.shape(x)[0], 1])}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "inputs")])
        def regress(self, inputs):
            features = {"x": tf.io.FixedLenFeature([3], tf.float32), "bias": tf.io.FixedLenFeature([], tf.float32, 0.0)}
            parsed = tf.io.parse_example(inputs, features)
            return {"outputs": self.factor * tf.reduce_sum(parsed["x"], 1) + parsed["bias"]}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, "rounds")])
        def work(self, rounds):
            value = tf.eye(128)
            for _ in tf.range(tf.reduce_max(rounds)):
                value = tf.matmul(value, value)
            return {"done": tf.cast(rounds, tf.float32) + 0 * value[0, 0]}

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32, "rows")])
        def grow(self, rows):
            return {"total": tf.reduce_sum(tf.random.uniform([rows, 2**20]) * self.factor)}

    model = Model()
    signatures = {
        "serving_default": model.scale,
        **{
            name: getattr(model, name).get_concrete_function()
            for name in ("pair", "classify", "regress", "work", "grow")
        },
    }
    tf.saved_model.save(model, str(path), signatures)
    _set_methods(path, {"classify": "tensorflow/serving/classify", "regress": "tensorflow/serving/regress"})


def _set_methods(path: Path, methods: dict[str, str]) -> None:
    """Sets the methods in a SavedModel: tf.saved_model.save only knows predict; keras_ddl's export does the same."""
    from tensorflow.core.protobuf import saved_model_pb2

    file = path / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    for name, method in methods.items():
        saved.meta_graphs[0].signature_def[name].method_name = method
    file.write_bytes(saved.SerializeToString())


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Running:
    """A server and its clients."""

    def __init__(self, process: subprocess.Popen, host: str) -> None:
        self.process, self.lines = process, []
        self._reader = threading.Thread(target=self._read, daemon=True)
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, f"the server ended: {self.lines}"
            self.lines.append(line)
            found = re.search(r"gRPC on \S+:(\d+), REST on https?://\S+:(\d+)(?:, health on http://\S+:(\d+))?", line)
        self.grpc_port, self.rest_port, self.health_port = (int(each or 0) for each in found.groups())
        self._reader.start()
        self.channel = grpc.insecure_channel(f"{host}:{self.grpc_port}")
        self.predictions = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)

    def _read(self) -> None:
        self.lines.extend(self.process.stdout)

    def rest(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=120)
        data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
        try:
            connection.request(method, path, data)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        is_json = answer.headers["Content-Type"].startswith("application/json")
        return answer.status, json.loads(text) if is_json else text

    def predict(self, x: Any, name: str = "model", **arguments: Any) -> np.ndarray:
        return tf.make_ndarray(self.predictions.Predict(predict_request({"x": x}, name, **arguments)).outputs["y"])

    def wait_for(self, version: int, name: str = "model", seconds: float = 300) -> None:
        done = threading.Event()
        for _ in range(int(seconds / 0.1)):
            status, answer = self.rest("GET", f"/v1/models/{name}/versions/{version}")
            if status == 200 and answer["model_version_status"][0]["state"] == "AVAILABLE":
                return
            done.wait(0.1)
        raise AssertionError(f"version {version} of {name} does not answer: {status} {answer} {self.lines}")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the server's exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(120)
        self._reader.join()
        self.channel.close()
        return status


@contextlib.contextmanager
def serving(*arguments: Any, host: str = "127.0.0.1", files: int | None = None) -> Iterator[Running]:
    """Runs the command on ports of its choice, and ends it. `files`: the limit for open files."""
    limited = [] if files is None else ["sh", "-c", f'ulimit -n {files} && exec "$0" "$@"']
    command = [*limited, str(COMMAND), "serve", "--host", host, "--port", "0", "--rest-port", "0", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
            "TESTS_HIDE": "tensorflow_serving",  # users need not have it
        },
    )
    running = None
    try:
        running = Running(process, host)
        yield running
    finally:
        if running is not None:
            running.end()
        process.kill()


def predict_request(inputs: dict[str, Any], name: str = "model", *, version=None, label=None, signature="", outputs=()):
    request = predict_pb2.PredictRequest(output_filter=outputs)
    request.model_spec.name, request.model_spec.signature_name = name, signature
    if version is not None:
        request.model_spec.version.value = version
    if label is not None:
        request.model_spec.version_label = label
    for alias, value in inputs.items():
        array = np.asarray(value, np.float32) if alias == "x" else value
        request.inputs[alias].CopyFrom(tf.make_tensor_proto(array))
    return request
