"""Attacks on a server, each bounded in count and time, and measurements during an attack."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from tensorflow_serving.apis import predict_pb2

from harness.serving import Running, predict_request, resident_bytes

MEGABYTE = 2**20
LIMIT = 256 * MEGABYTE  # memory limit of attacked servers
PREDICT = "/v1/models/model:predict"
SERVICE, MODELS = "/tensorflow.serving.PredictionService", "/tensorflow.serving.ModelService"
X = np.ones([2, 3], np.float32)
BUSY_SECONDS = 30.0  # limit for a Predict on a machine busy with other tests
# Hand-written HTTP/2, because a gRPC client would read its responses and finish its requests.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(path: str, stream: int) -> bytes:
    """Begins a call. Uses literal headers, so that each frame is independent."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(_HEADERS, _END_HEADERS, stream, block)


def message(data: bytes, claimed: int | None = None) -> bytes:
    return b"\0" + struct.pack(">I", len(data) if claimed is None else claimed) + data


@contextlib.contextmanager
def connected(port: int, count: int = 1) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            with contextlib.suppress(OSError):  # being refused is an answer, too
                found.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)))
        yield found


def send(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        client.sendall(data)


def post(server: Running, path: str, body: bytes, **more: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=120)
    try:
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in more.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# ---- the attacks -----------------------------------------------------------------------------------------------------


def mixed_values(server: Running) -> None:
    """146 bytes: a long text among numbers. NumPy gives each number as much room as the text needs."""
    body = b'{"instances": ["' + b"a" * 16_000 + b'"' + b",1" * 40_000 + b"]}"
    assert post(server, PREDICT, gzip.compress(body), Content_Encoding="gzip")[0] in (400, 503)


def pairs(size: int, count: int) -> predict_pb2.PredictRequest:
    """Returns a request in which one string of `size` bytes is repeated `count` times."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = "model", "pair"
    text, number = request.inputs["text"], request.inputs["number"]
    text.dtype, text.string_val[:] = 7, [b"t" * size]
    number.dtype, number.int64_val[:] = 9, [1]
    for each in (text, number):
        each.tensor_shape.dim.add(size=count)
    return request


def repeated_text(server: Running) -> None:
    """One string that stands for 800,000, and TensorFlow copies it as often."""
    code_of(server, "Predict", pairs(1400, 800_000).SerializeToString())


def repeated_context(server: Running) -> None:
    """A context that is merged into every example."""
    body = b'{"signature_name": "regress", "context": {"x": "' + b"a" * 40_000 + b'"}, "examples": [' + b"{}," * 19_000
    body += b"{}]}"
    assert post(server, "/v1/models/model:regress", gzip.compress(body), Content_Encoding="gzip")[0] in (400, 413, 503)


def unread_replies(server: Running) -> None:
    """Clients of gRPC and REST that do not read their responses: 8 MB for each 1.5 KB over gRPC."""
    data = message(pairs(1400, 3000).SerializeToString())
    body = b'{"inputs": [' + b"[1,1,1]," * 150_000 + b"[1,1,1]]}"
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connected(server.grpc_port, 10) as readers, connected(server.rest_port, 40) as clients:
        for reader in readers:
            send(reader, _PREFACE + frame(_SETTINGS, 0, 0))
        for stream in range(1, 40, 2):
            for reader in readers:
                send(reader, headers(f"{SERVICE}/Predict", stream) + frame(_DATA, _END_STREAM, stream, data))
            time.sleep(0.1)
        for client in clients:
            client.settimeout(2)
            send(client, head + body)
        time.sleep(5)


def streams_without_a_body(server: Running) -> None:
    with connected(server.grpc_port) as (client,):
        begun = b"".join(headers(f"{SERVICE}/Predict", 2 * number + 1) for number in range(60))
        send(client, _PREFACE + frame(_SETTINGS, 0, 0) + begun)
        time.sleep(0.3)
        assert predict_seconds(server) < BUSY_SECONDS
        time.sleep(1)


def endless_messages(server: Running) -> None:
    """Each claims 60 MB and sends as much as the HTTP/2 windows allow."""
    piece = frame(_DATA, 0, 1, b"x" * 16_000)
    with connected(server.grpc_port, 150) as clients:
        for client in clients:
            client.settimeout(0.5)
            begin = message(b"", 60 * MEGABYTE)
            send(
                client, _PREFACE + frame(_SETTINGS, 0, 0) + headers(f"{SERVICE}/Predict", 1) + frame(_DATA, 0, 1, begin)
            )
        for client in clients:
            client.setblocking(False)
        for _ in range(900):
            for client in clients:
                with contextlib.suppress(OSError):
                    client.send(piece)
            time.sleep(0.001)


def health_watches(server: Running) -> None:
    with connected(server.grpc_port, 80) as clients:
        for client in clients:
            begun = [
                headers("/grpc.health.v1.Health/Watch", 2 * number + 1)
                + frame(_DATA, _END_STREAM, 2 * number + 1, message(b""))
                for number in range(100)
            ]
            send(client, _PREFACE + frame(_SETTINGS, 0, 0) + b"".join(begun))
            time.sleep(0.05)  # gRPC itself refuses many that arrive at once
        time.sleep(1)
        assert predict_seconds(server) < BUSY_SECONDS


def invented_names(server: Running) -> None:
    before = len(server.rest("GET", "/monitoring/prometheus/metrics")[1])
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=60)
    for number in range(600):
        for path in (f"/v1/models/model:method{number}", f"/v1/models/name{number}:predict", f"/v{number}/x"):
            connection.request("POST", path, b"{}")
            connection.getresponse().read()
    connection.close()
    assert len(server.rest("GET", "/monitoring/prometheus/metrics")[1]) < before + 20_000


def no_more_files(server: Running) -> None:
    """No file can be opened; loaded models stay."""
    pid = server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with connected(server.rest_port, 5), connected(server.grpc_port, 5):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
        time.sleep(2.5)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    status, answer = server.rest("GET", "/v1/models/model")
    assert status == 200 and [each["state"] for each in answer["model_version_status"]] == ["AVAILABLE"], answer
    assert not any("unloaded" in line for line in server.lines), server.lines


def growing_model(server: Running) -> None:
    """Four bytes that the model expands to 4 GB."""
    request = predict_request({"rows": np.int32(1000)}, signature="grow")
    assert code_of(server, "Predict", request.SerializeToString()) in ("RESOURCE_EXHAUSTED", "UNAVAILABLE")


def endless_fields(server: Running) -> None:
    """Messages of up to 60 MB that name no model; 61 KB if compressed."""
    size = 60 * MEGABYTE
    for data in (bytes(size), b"\x08\x01" * (size // 2), b"\x0b" * size, b"\x0a\x02\x0a\x00" * (size // 4)):
        for compression in (None, grpc.Compression.Gzip, grpc.Compression.Deflate):
            assert code_of(server, "Predict", data, compression) == "INVALID_ARGUMENT"


def compressed_zeros(server: Running) -> None:
    """A request that names its model, whose process must decompress no more than the limit."""
    data = predict_request({}).SerializeToString() + b"\x1a\x80\x80\x80\x60" + bytes(192 * MEGABYTE)
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert code_of(server, "Predict", data, compression) == "RESOURCE_EXHAUSTED"


def lists_of_models(server: Running) -> None:
    """Control messages are parsed in the process that clients connect to, so they must be small."""
    for data in (bytes(64 * MEGABYTE), b"\x0a\x02\x0a\x00" * MEGABYTE):
        for compression in (None, grpc.Compression.Gzip):
            code = code_of(server, "HandleReloadConfigRequest", data[: 60 * MEGABYTE], compression, MODELS)
            assert code in ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED")


def endless_headers(server: Running) -> None:
    head = b"GET /healthz HTTP/1.1\r\n"
    for data in (head + b"a: b\r\n" * MEGABYTE, b"GET /" + b"a" * (8 * MEGABYTE), (head + b"\r\n") * 200_000):
        with connected(server.rest_port) as (client,):
            send(client, data)
            with contextlib.suppress(ConnectionError):
                assert b" 400 " in client.recv(100)


def endless_frames(server: Running) -> None:
    """Sends settings, pings, window updates, and headers that never end."""
    many = b"".join(b"\0\4k%03d\1v" % number for number in range(1000))
    for data in (frame(_SETTINGS, 0, 0), frame(6, 0, 0, bytes(8)), frame(8, 0, 0, b"\0\0\0\1"), frame(9, 0, 1, many)):
        with connected(server.grpc_port) as (client,):
            client.settimeout(5)
            begun = frame(_HEADERS, 0, 1, many) if data[3] == 9 else b""
            send(client, _PREFACE + frame(_SETTINGS, 0, 0) + begun + data * (8 * MEGABYTE // len(data) // 4))


def silent_clients(server: Running) -> None:
    """A thousand clients on each port send nothing, or stop midway; a new client still gets an answer at once."""
    begun = _PREFACE + frame(_SETTINGS, 0, 0)
    post = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n[".encode()
    grpc_port, rest_port = server.grpc_port, server.rest_port
    for port, sent in (
        *((grpc_port, each) for each in (b"", begun[:10], begun, begun + headers(f"{SERVICE}/Predict", 1))),
        *((rest_port, each) for each in (b"", b"GET /healthz HTTP/1.1\r\nA", post)),
    ):
        with connected(port, 1000) as clients:
            for client in clients:
                send(client, sent)
            begin = time.monotonic()
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
                channel.unary_unary(f"{SERVICE}/Predict")(
                    predict_request({"x": X}).SerializeToString(), timeout=60, wait_for_ready=True
                )
            assert server.rest("POST", PREDICT, {"inputs": X.tolist()})[0] == 200
            assert time.monotonic() - begin < BUSY_SECONDS, (port, sent[:30])


def code_of(
    server: Running, method: str, data: bytes, compression: grpc.Compression | None = None, service: str = SERVICE
) -> str:
    try:
        server.channel.unary_unary(f"{service}/{method}")(data, timeout=60, compression=compression)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


ATTACKS: dict[str, Callable[[Running], None]] = {
    each.__name__: each
    for each in (
        *(mixed_values, repeated_text, repeated_context, unread_replies, streams_without_a_body),
        *(endless_messages, health_watches, invented_names, no_more_files),
        *(growing_model, endless_fields, compressed_zeros, lists_of_models, endless_headers),
        *(endless_frames, silent_clients),
    )
}

# ---- measurements ----------------------------------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    """Returns the pids of a process and all its current descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [each for child in (task / "children").read_text().split() for each in children_of(int(child))]
    return found


def memory_of(pid: int) -> dict[int, int]:
    """Returns resident bytes by process."""
    found = {}
    for each in children_of(pid):
        with contextlib.suppress(OSError):
            found[each] = resident_bytes(each)
    return found


def predict_seconds(server: Running) -> float:
    begin = time.monotonic()
    np.testing.assert_array_equal(server.predict(X), 3 * X)
    return time.monotonic() - begin


@dataclass
class Observed:
    """
    health: seconds of each response of the separate health port, each over a new connection.
    rest: seconds of each response of the REST interface's own health path, over one connection.
    peak: the largest growth of a process's memory. predict: seconds.
    """

    health: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    peak: int = 0
    predict: float = 0.0


def p99(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99)) if seconds else float("inf")


def poll_health(port: int, seconds: list[float], stop: threading.Event, *, anew: bool) -> None:
    """Records how long each response takes. `anew`: each over a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not stop.wait(0.01):
        begin = time.monotonic()
        try:
            connection.request("GET", "/healthz")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):  # an idle connection may be closed in favor of others
            connection.close()
        seconds.append(time.monotonic() - begin)
        if anew:
            connection.close()
    connection.close()


@contextlib.contextmanager
def observed(server: Running) -> Iterator[Observed]:
    """Polls health and memory until the block ends, then predicts."""
    pid, stop, found = server.process.pid, threading.Event(), Observed()
    first = memory_of(pid)
    most = max(first.values())

    def look() -> None:
        while not stop.wait(0.02):
            for each, size in memory_of(pid).items():
                found.peak = max(found.peak, size - first.get(each, most))

    threads = [
        threading.Thread(target=look),
        threading.Thread(target=poll_health, args=(server.rest_port, found.rest, stop), kwargs={"anew": False}),
    ]
    if server.health_port:
        arguments = (server.health_port, found.health, stop)
        threads.append(threading.Thread(target=poll_health, args=arguments, kwargs={"anew": True}))
    for each in threads:
        each.start()
    try:
        time.sleep(0.2)
        yield found
    finally:
        time.sleep(0.2)
        stop.set()
        for each in threads:
            each.join()
    found.predict = predict_seconds(server)
