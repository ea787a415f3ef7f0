"""Hostile requests: small ones that would expand, and invalid bodies. Other requests are answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from serving_attacks import MEGABYTE, PREDICT, X, post
from tensorflow_serving.apis import predict_pb2

from harness.serving import Running, predict_request, resident_bytes, serving
from keras_ddl.serving.interfaces.connections import disconnect
from keras_ddl.serving.processes.forked import ForkServer
from keras_ddl.serving.processes.model_process import ModelProcess
from keras_ddl.serving.protocol import bodies
from keras_ddl.serving.protocol.status import Code, RequestError
from keras_ddl.serving.settings import Options

# Far above the measured 0.05 s on two idle cores, and below the tens of seconds of a parser that blocks
# other requests.
HEALTH_SECONDS = 10.0


@contextlib.contextmanager
def healthy(server: Running, seconds: float = HEALTH_SECONDS) -> Iterator[None]:
    """Checks that /healthz answers in time during the block."""
    stop, slowest = threading.Event(), [0.0]

    def ask() -> None:
        while not stop.wait(0.01):
            begin = time.monotonic()
            server.rest("GET", "/healthz")
            slowest[0] = max(slowest[0], time.monotonic() - begin)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert slowest[0] < seconds


def settled(server: Running, before: int, more: int) -> bool:
    """Returns whether the server's memory returns to at most `more` bytes above `before`."""
    for _ in range(600):
        if resident_bytes(server.process.pid) - before < more:
            return True
        time.sleep(0.1)
    return False


def claims(names: list[str], size: int) -> predict_pb2.PredictRequest:
    """Returns a request with one value for each input, in a tensor that claims `size` rows of three."""
    request = predict_request({})
    for name in names:
        tensor = request.inputs[name]
        tensor.dtype, tensor.float_val[:] = 1, [1.0]
        for each in (size, 3):
            tensor.tensor_shape.dim.add(size=each)
    return request


@pytest.fixture(scope="module")
def strict(versions: Path) -> Iterator[Running]:
    """A server that accepts requests of 8 MB, and whose processes may hold 256 MB for requests."""
    with serving(versions, "--max-message-mb", 8, "--max-memory-mb", 256, "--timeout", 60) as server:
        server.wait_for(3)
        server.predict(X)
        yield server


BODIES: dict[str, tuple[int, Callable[[], bytes]]] = {
    "numbers": (400, lambda: b'{"instances":[' + b"1," * (3 * MEGABYTE) + b"1]}"),
    "objects": (400, lambda: b'{"instances":[' + b"{}," * (2 * MEGABYTE) + b"1]}"),
    "lists": (400, lambda: b"[" * (7 * MEGABYTE)),
    "empty lists": (400, lambda: b'{"instances":[' + b"[]," * (2 * MEGABYTE) + b"[]]}"),
    "deep": (400, lambda: b'{"instances":' + b"[" * MEGABYTE + b"]" * MEGABYTE + b"}"),
    "texts": (400, lambda: b'{"instances":[' + b'"ab",' * MEGABYTE + b'"a"]}'),
    "too long": (413, lambda: b" " * (9 * MEGABYTE)),
}


@pytest.mark.parametrize("name", BODIES)
def test_expanding_json_is_refused_and_blocks_no_request(strict: Running, name: str) -> None:
    status, body = BODIES[name]
    before = resident_bytes(strict.process.pid)
    with healthy(strict):
        found, answer = post(strict, PREDICT, body())
    assert found == status and (b'"error"' in answer) == (status != 200), answer[:300]
    assert settled(strict, before, 64 * MEGABYTE)
    np.testing.assert_array_equal(strict.predict(X), 3 * X)


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (gzip.compress(bytes(256 * MEGABYTE), 1), "gzip", 413),
        (gzip.compress(bytes(MEGABYTE))[:-20], "gzip", 400),
        (gzip.compress(b"{}") + b"more", "gzip", 400),
        (b"no gzip at all", "gzip", 400),
        (b"{}", "br", 400),
    ],
    ids=["bomb", "cut off", "longer", "false", "unknown"],
)
def test_compressed_bodies_are_decompressed_up_to_the_limit(
    strict: Running, body: bytes, encoding: str, status: int
) -> None:
    before = resident_bytes(strict.process.pid)
    with healthy(strict):
        assert post(strict, PREDICT, body, Content_Encoding=encoding)[0] == status
    assert settled(strict, before, 64 * MEGABYTE)
    assert not any("Traceback" in line for line in strict.lines)


def test_large_requests_within_the_limits_are_answered(strict: Running) -> None:
    rows = np.random.default_rng(0).normal(size=(40_000, 3)).astype(np.float32)
    text = b'{"inputs": ' + str(rows.tolist()).encode() + b"}"
    for body, headers in ((text, {}), (gzip.compress(text), {"Content_Encoding": "gzip"})):
        status, answer = post(strict, PREDICT, body, **headers)
        assert status == 200, answer[:200]
        np.testing.assert_array_equal(np.float32(json.loads(answer)["outputs"]["y"]), 3 * rows)
    np.testing.assert_array_equal(strict.predict(rows), 3 * rows)


def test_oversized_tensors_are_refused_before_they_are_unpacked(strict: Running) -> None:
    before = resident_bytes(strict.process.pid)
    for names, size, code in (
        ([f"x{number}" for number in range(60)], 600_000, grpc.StatusCode.INVALID_ARGUMENT),
        (["x"], 15_000_000, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        with healthy(strict), pytest.raises(grpc.RpcError) as caught:
            strict.predictions.Predict(claims(names, size))
        assert caught.value.code() == code, caught.value
    assert resident_bytes(strict.process.pid) - before < 32 * MEGABYTE


def test_unknown_models_are_refused_before_the_body(strict: Running) -> None:
    """The response arrives before the body is sent."""
    with socket.create_connection(("127.0.0.1", strict.rest_port), timeout=120) as client:
        client.sendall(b"POST /v1/models/none:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n")
        assert b"404" in client.recv(1000).partition(b"\r\n")[0]


def test_concurrent_requests_stay_below_the_limit(strict: Running) -> None:
    """Bodies that stop early: stalled ones give way to other requests, or these wait for them."""
    part = b'{"instances": [' + b" " * (7 * MEGABYTE)
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: {8 * MEGABYTE}\r\n\r\n".encode()
    before = resident_bytes(strict.process.pid)
    clients = [socket.create_connection(("127.0.0.1", strict.rest_port), timeout=120) for _ in range(45)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(head + part)
    assert resident_bytes(strict.process.pid) - before < 320 * MEGABYTE
    np.testing.assert_array_equal(strict.predict(X), 3 * X)  # small requests are not counted
    for _ in range(1200):
        status, answer = post(strict, PREDICT, part + b"]}")
        if status == 400:
            break
        assert status == 503 and b"--max-memory-mb" in answer, (status, answer)
        time.sleep(0.05)
    assert status == 400 and b"at least one row" in answer, (status, answer)
    for client in clients:
        client.close()
    assert settled(strict, before, 64 * MEGABYTE)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"\xff" * 20_000,
    ],
    ids=["TLS", "version", "length", "noise"],
)
def test_invalid_http_is_answered_without_a_traceback(strict: Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", strict.rest_port), timeout=120) as client:
        client.sendall(sent + b"\r\n\r\n")
        assert b" 400 " in client.recv(1000).partition(b"\r\n")[0]
    assert not any("Traceback" in line for line in strict.lines)


def test_client_that_leaves_during_its_body_causes_no_error(strict: Running) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", strict.rest_port), timeout=120) as client:
            client.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
    np.testing.assert_array_equal(strict.predict(X), 3 * X)
    assert not any("Traceback" in line or "Unhandled" in line for line in strict.lines)


def test_connections_without_a_request_are_closed(versions: Path) -> None:
    with serving(versions, "--idle-seconds", 1) as server:
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost:"):
            with socket.create_connection(("127.0.0.1", server.rest_port), timeout=120) as client:
                client.sendall(sent)
                client.recv(1000)  # ends before the timeout


def test_connections_stay_below_the_limit_of_open_files(versions: Path) -> None:
    """A new connection must never wait for a descriptor."""
    with serving(versions, files=256) as server, contextlib.ExitStack() as stack:
        server.wait_for(3)
        server.predict(X)
        for _ in range(300):
            for port, sent in ((server.rest_port, b"GET /healthz HTTP/1.1\r\n"), (server.grpc_port, b"PRI * HTTP/2")):
                with contextlib.suppress(OSError):  # gRPC closes excess connections
                    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
                    client.sendall(sent)
        for _ in range(5):
            begin = time.monotonic()
            assert server.rest("GET", "/healthz") == (200, "ok\n")
            assert time.monotonic() - begin < 10  # the server waits 20 s for an endless header
        assert server.rest("POST", PREDICT, {"inputs": X.tolist()})[0] == 200
        assert len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < 256
        np.testing.assert_array_equal(server.predict(X), 3 * X)
        assert not any("open files" in line for line in server.lines), server.lines


@pytest.mark.parametrize(
    ("host", "family", "name"),
    [
        ("127.0.0.1", socket.AF_INET, "ipv4:127.0.0.1:{}"),
        ("127.0.0.1", socket.AF_INET6, "ipv4:127.0.0.1:{}"),
        ("::1", socket.AF_INET6, "ipv6:%5B::1%5D:{}"),
    ],
    ids=["4", "4 as 6", "6"],
)
def test_disconnect_accepts_grpcs_names_of_clients(host: str, family: socket.AddressFamily, name: str) -> None:
    try:
        listener = socket.create_server(
            ("" if family == socket.AF_INET6 else host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError:
        pytest.skip("there is no IPv6 here")
    with listener, contextlib.ExitStack() as stack:
        address = (host, listener.getsockname()[1])
        clients = [stack.enter_context(socket.create_connection(address, timeout=120)) for _ in range(2)]
        servers = [stack.enter_context(listener.accept()[0]) for _ in clients]
        disconnect(name.format(clients[0].getsockname()[1]))
        assert clients[0].recv(10) == b""
        servers[1].sendall(b"yes")
        assert clients[1].recv(10) == b"yes"


def test_slow_model_does_not_block_a_fast_one(versions: Path) -> None:
    with serving(f"slow={versions}", f"fast={versions}", "--threads", 1, "--queue", 100) as server:
        for name in ("slow", "fast"):
            server.wait_for(3, name)
        work = predict_request({"rounds": np.int32([200_000])}, "slow", signature="work")
        slow = [server.predictions.Predict.future(work) for _ in range(8)]
        begin = time.monotonic()
        for _ in range(5):
            np.testing.assert_array_equal(server.predict(X, "fast"), 3 * X)
        assert not slow[0].done(), f"the slow model was not slow: {time.monotonic() - begin}"
        for each in slow:
            each.cancel()


def test_queue_holds_its_limit_of_waiting_requests() -> None:
    async def ask(threads: int, queue: int) -> None:
        process = ModelProcess(
            ForkServer(()), "model", 1, Path(), Options(threads=threads, queue=queue)
        )  # never started
        waiting = [asyncio.create_task(process.call({}, b"")) for _ in range(threads + queue)]
        await asyncio.sleep(0)
        assert process.busy == threads + queue
        with pytest.raises(RequestError, match="queue of model 'model' is full") as full:
            await asyncio.wait_for(process.call({}, b""), 60)
        assert full.value.code == Code.UNAVAILABLE
        process.close()
        for answer in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(answer, RequestError) and answer.code == Code.UNAVAILABLE

    asyncio.run(ask(threads=1, queue=0))
    asyncio.run(ask(threads=2, queue=3))


def test_compressed_body_is_complete_or_refused() -> None:
    body = gzip.compress(b"x" * 1000)
    assert bodies.inflated(body, "gzip", 1000) == b"x" * 1000
    for wrong in (body[:-1], body[:-8], body[: len(body) // 2], b"", body + b"x", body + body):
        with pytest.raises(RequestError, match="is truncated, or has data after its end") as refused:
            bodies.inflated(wrong, "gzip", 1000)
        assert refused.value.code == Code.INVALID_ARGUMENT
