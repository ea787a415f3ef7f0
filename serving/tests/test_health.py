"""The health port and its process: responses, and independence from the server."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.serving import serving
from keras_ddl.serving.interfaces.health import HealthPort

SILENT_SECONDS = 4.0  # probes right after a message of the server must arrive within this time


def ask(port: int, path: str = "/healthz", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def health() -> Iterator[HealthPort]:
    port = HealthPort("127.0.0.1", 0, SILENT_SECONDS)
    try:
        yield port
    finally:
        with contextlib.suppress(OSError):
            port.close()


def until(port: int, path: str, status: int, seconds: float = 120) -> str:
    for _ in range(int(seconds / 0.05)):
        found, text = ask(port, path)
        if found == status:
            return text
        time.sleep(0.05)
    raise AssertionError((path, found, text))


def test_health_follows_the_server_and_fails_when_it_is_silent(health: HealthPort) -> None:
    assert ask(health.port) == (200, "ok\n")
    assert ask(health.port, "/readyz") == (503, "not ready\n")
    health.show(True)
    assert until(health.port, "/readyz", 200) == "ready\n"
    assert ask(health.port, "/readyz", "HEAD") == (200, "")
    for wrong in (("/", "GET"), ("/healthz", "POST")):
        assert ask(health.port, *wrong)[0] == 404
    assert "silent for 4 s" in until(health.port, "/healthz", 503)
    assert ask(health.port, "/readyz")[0] == 503
    health.show(False)
    assert until(health.port, "/healthz", 200) == "ok\n"
    assert ask(health.port, "/readyz") == (503, "not ready\n")


def test_dead_health_process_is_restarted(health: HealthPort) -> None:
    health._process.kill()
    health._process.wait()
    health.show(True)
    assert until(health.port, "/readyz", 200) == "ready\n"


def test_idle_connections_give_way_to_new_ones(health: HealthPort) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", health.port), timeout=120)) for _ in range(300)
        ]
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(b"GET /heal")
        health.show(True)
        assert ask(health.port) == (200, "ok\n")
        with contextlib.suppress(ConnectionError):
            assert clients[0].recv(100) == b""
        clients[-1].sendall(b"x" * 20_000)
        with contextlib.suppress(ConnectionError):
            assert clients[-1].recv(100) == b""


def test_stopped_server_still_has_health_and_a_killed_one_leaves_nothing(versions: Path) -> None:
    with serving(versions, "--health-port", 0) as server:
        assert until(server.health_port, "/readyz", 200) == "ready\n"
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            assert ask(server.health_port) == (200, "ok\n")  # does not need the server
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        server.process.kill()
        server.process.wait()
        for _ in range(2000):
            try:
                ask(server.health_port)
            except OSError:
                return
            time.sleep(0.05)
        raise AssertionError("its port is still open")
