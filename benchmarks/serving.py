"""Measures the cost of a server for a small CNN: calls in the process, keras-ddl serve by gRPC and REST, and FastAPI.

    python benchmarks/serving.py
    python benchmarks/serving.py --fastapi-python venv/bin/python   # one with fastapi, uvicorn and tensorflow

Every contestant answers the same two rows with the same SavedModel, in interleaved rounds of one run. First one client
sends requests one after the other (median and 99th percentile), then `--clients` clients at once (answers per second).
The bounds are the call in the process, and a server that ignores its input and always gives the same answer, which
shows the cost of clients, gRPC and HTTP alone. The peer is a plain FastAPI script.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import grpc
import keras
import numpy as np
import tensorflow as tf
from _rounds import machine
from _smoke import options_of
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

import keras_ddl

FASTAPI = """
import sys
import numpy as np
import tensorflow as tf
import uvicorn
from fastapi import FastAPI

model = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
app = FastAPI()


@app.post("/predict")
def predict(body: dict):
    rows = tf.constant(np.array(body["instances"], np.float32))
    return {"predictions": model(image=rows)["output_0"].numpy().tolist()}


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", access_log=False, timeout_keep_alive=600)
"""


def small_cnn(path: Path) -> None:
    """Writes a CNN for digits of 28 x 28."""
    keras.utils.set_random_seed(1)
    convolutions = [keras.layers.Conv2D(n, 3, strides=2, activation="relu") for n in (16, 32)]
    layers = [keras.Input((28, 28, 1), name="image"), *convolutions, keras.layers.Flatten(), keras.layers.Dense(10)]
    keras.Sequential(layers).export(str(path), verbose=False)


@contextlib.contextmanager
def ours(folder: Path) -> Iterator[tuple[int, int]]:
    """Runs keras-ddl serve; yields its gRPC and REST ports."""
    command = [Path(sys.executable).with_name("keras-ddl"), "serve", folder, "--port", 0, "--rest-port", 0]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as process:
        try:
            ports = first_match(process, r"gRPC on \S+:(\d+), REST on \S+:(\d+)")
            wait_for(process, lambda: http_status(ports[1], "/readyz") == 200)
            yield ports
        finally:
            process.terminate()


@contextlib.contextmanager
def bare(folder: Path, outputs: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs the server that ignores its input; yields its gRPC and REST ports."""
    response = predict_pb2.PredictResponse()
    response.outputs["output_0"].CopyFrom(tf.make_tensor_proto(outputs))
    answers = [folder / "answer.pb", folder / "answer.json"]
    answers[0].write_bytes(response.SerializeToString())
    answers[1].write_text(json.dumps({"predictions": outputs.tolist()}))
    script = Path(__file__).with_name("_bare_server.py")
    with subprocess.Popen([sys.executable, script, *answers], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield first_match(process, r"(\d+) (\d+)")
        finally:
            process.terminate()


@contextlib.contextmanager
def fastapi(python: str, folder: Path, port: int) -> Iterator[None]:
    """Runs the FastAPI script."""
    script = folder.parent / "fastapi_server.py"
    script.write_text(FASTAPI)
    with subprocess.Popen([python, str(script), str(folder / "1"), str(port)]) as process:
        try:
            wait_for(process, lambda: http_status(port, "/openapi.json") == 200)
            yield
        finally:
            process.terminate()


def http_status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.suppress(OSError):
        connection.request("GET", path)
        return connection.getresponse().status
    return 0


def first_match(process: subprocess.Popen[str], pattern: str) -> tuple[int, int]:
    """Returns the two numbers in the first matching line of a server's output; exits if the server ends before."""
    for line in process.stdout:
        if found := re.search(pattern, line):
            return int(found[1]), int(found[2])
    return sys.exit(f"a server ended while it started, with status {process.wait()}; see above")


def wait_for(process: subprocess.Popen[str], ready: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None:
            sys.exit(f"a server ended while it started, with status {process.returncode}; see above")
        if time.monotonic() > end:
            sys.exit("a server did not begin to answer")
        time.sleep(0.1)


def rest_client(port: int, path: str, rows: np.ndarray) -> Callable[[], np.ndarray]:
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask() -> np.ndarray:
        body = json.dumps({"instances": rows.tolist()})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return np.array(json.loads(connection.getresponse().read())["predictions"])

    return ask


def grpc_client(port: int, rows: np.ndarray) -> Callable[[], np.ndarray]:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each client
    stub = prediction_service_pb2_grpc.PredictionServiceStub(grpc.insecure_channel(f"127.0.0.1:{port}", options))

    def ask() -> np.ndarray:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "model"
        request.inputs["image"].CopyFrom(tf.make_tensor_proto(rows))
        return tf.make_ndarray(stub.Predict(request).outputs["output_0"])

    return ask


def in_process(folder: Path, rows: np.ndarray) -> Callable[[], np.ndarray]:
    function = tf.saved_model.load(str(folder / "1")).signatures["serving_default"]
    return lambda: function(image=tf.constant(rows))["output_0"].numpy()


def alone(ask: Callable[[], object], requests: int) -> tuple[float, float]:
    """Returns the median and the 99th percentile of `ask`, in milliseconds."""
    seconds = []
    for _ in range(requests):
        begin = time.perf_counter()
        ask()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds)) * 1e3, float(np.percentile(seconds, 99)) * 1e3


def together(make: Callable[[], Callable[[], object]], clients: int, requests: int) -> float:
    """Returns answers per second for `clients` threads that send `requests` requests in all."""

    def work() -> None:
        ask = make()
        for _ in range(requests // clients):
            ask()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return requests // clients * clients / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="requests to a contestant in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--fastapi-python", help="a python with fastapi, uvicorn and tensorflow")
    arguments = options_of(parser, requests=4, rounds=1, clients=2)
    rows = np.random.default_rng(0).random((2, 28, 28, 1), np.float32)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        small_cnn(folder / "1")
        grpc_port, rest_port = stack.enter_context(ours(folder))
        model = in_process(folder, rows)
        bare_grpc, bare_rest = stack.enter_context(bare(folder.parent, model()))
        path = "/v1/models/model:predict"
        contestants: dict[str, Callable[[], Callable[[], np.ndarray]]] = {
            "in the process": lambda: model,
            "the same answer, gRPC": lambda: grpc_client(bare_grpc, rows),
            "keras-ddl serve, gRPC": lambda: grpc_client(grpc_port, rows),
            "the same answer, REST": lambda: rest_client(bare_rest, path, rows),
            "keras-ddl serve, REST": lambda: rest_client(rest_port, path, rows),
        }
        if arguments.fastapi_python:
            port = rest_port + 1
            stack.enter_context(fastapi(arguments.fastapi_python, folder, port))
            contestants["FastAPI, REST"] = lambda: rest_client(port, "/predict", rows)
        asks = {name: make() for name, make in contestants.items()}
        expected = asks["in the process"]()
        for name, ask in asks.items():
            np.testing.assert_allclose(ask(), expected, rtol=1e-5, atol=1e-6, err_msg=name)
            alone(ask, 100)
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contestants}
        for _ in range(arguments.rounds):
            for name, make in contestants.items():
                rate = together(make, arguments.clients, arguments.requests)
                found[name].append((*alone(asks[name], arguments.requests), rate))
    keras_ddl.init()  # machine() needs it
    print(machine())
    print(f"{'':24} {'p50 ms':>8} {'p99 ms':>8} {'over the call':>15} {f'{arguments.clients} clients, 1/s':>18}")
    bound = np.median([each[0] for each in found["in the process"]])
    for name, rounds in found.items():
        p50, p99, rate = np.median(rounds, axis=0)
        print(f"{name:24} {p50:8.3f} {p99:8.3f} {p50 - bound:12.3f} ms {rate:18.0f}")


if __name__ == "__main__":
    main()
