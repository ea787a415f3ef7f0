"""Faults beside requests: logs that cannot be written, killed processes, requests that never end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from serving_attacks import PREDICT, X, children_of

from harness.serving import Running, predict_request, serving
from keras_ddl.serving.background_lines import BackgroundLines
from keras_ddl.serving.model_config import ModelConfig
from keras_ddl.serving.model_manager import ModelManager, State
from keras_ddl.serving.processes.model_process import LoadError, LoadInterrupted
from keras_ddl.serving.protocol.status import Code, RequestError

TIMEOUT = 3.0


@pytest.fixture(scope="module")
def server(versions: Path) -> Iterator[Running]:
    """A server whose access log is on a full disk."""
    with serving(versions, "--access-log", "/dev/full", "--timeout", TIMEOUT, "--threads", 2) as running:
        running.wait_for(3)
        yield running


def test_full_log_disk_fails_no_request(server: Running) -> None:
    for _ in range(20):
        np.testing.assert_array_equal(server.predict(X), 3 * X)
        assert server.rest("POST", PREDICT, {"inputs": X.tolist()})[0] == 200
    lost = [line for line in server.lines if "/dev/full is incomplete: No space left on device" in line]
    assert len(lost) == 1, server.lines


def test_endless_requests_are_refused_together(server: Running) -> None:
    """They are not refused one after another, each when the process of the previous one has ended."""
    endless = predict_request({"rounds": np.int32([10**9])}, signature="work")
    begin = time.monotonic()
    calls = [server.predictions.Predict.future(endless, timeout=120) for _ in range(8)]
    for each in calls:
        with pytest.raises(grpc.RpcError, match="or was not answered, within 3 s") as caught:
            each.result()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - begin < 2.5 * TIMEOUT  # one after another would take four times as long
    np.testing.assert_array_equal(server.predict(X), 3 * X)
    assert any("answers again after" in line for line in server.lines), server.lines


def fork_server_of(server: Running) -> int:
    """Returns the fork server, the only child of the server."""
    (pid,) = [each for each in children_of(server.process.pid)[1:] if parent_of(each) == server.process.pid]
    return pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ask_until_answered(server: Running, seconds: float = 120) -> set[int]:
    """Returns the statuses of requests until one succeeds; 504 is for requests that waited too long."""
    statuses, end = set(), time.monotonic() + seconds
    while 200 not in statuses and time.monotonic() < end:
        statuses.add(server.rest("POST", PREDICT, {"inputs": X.tolist()})[0])
        statuses.add(server.rest("GET", "/v1/models/model/metadata")[0])
    return statuses


def test_version_killed_while_loading_is_unavailable_then_returns(server: Running) -> None:
    fork_server, killed = fork_server_of(server), 0
    while killed < 4:
        for pid in children_of(fork_server)[1:]:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        time.sleep(0.01)
    assert ask_until_answered(server) <= {200, 503, 504}
    states = server.rest("GET", "/v1/models/model")[1]["model_version_status"]
    assert [(each["version"], each["state"]) for each in states] == [("3", "AVAILABLE")]


def test_killed_fork_server_is_restarted(server: Running) -> None:
    killed = fork_server_of(server)
    os.kill(killed, signal.SIGKILL)
    end = time.monotonic() + 120
    while Path(f"/proc/{killed}").exists() and time.monotonic() < end:  # until it is gone, and no zombie either
        assert ask_until_answered(server) <= {200, 503, 504}
    assert fork_server_of(server) != killed
    assert ask_until_answered(server) <= {200, 503, 504}


def test_server_has_no_socket_file(server: Running) -> None:
    """A killed server would leave it behind."""
    inodes = set()
    for pid in children_of(server.process.pid):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(str(each.readlink()))
    named = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    assert not [words[7] for words in named if len(words) > 7 and f"socket:[{words[6]}]" in inodes]


def test_lines_that_cannot_be_written_are_lost_without_blocking() -> None:
    read, write = os.pipe()
    lost: list[str] = []
    lines = BackgroundLines(write, lost.append)
    begin = time.monotonic()
    for number in range(30_000):  # a pipe holds 64 KB, and nothing reads it
        lines.write(f"{number:099}\n")
    assert time.monotonic() - begin < 30 and len(lost) == 1 and "wait to be written" in lost[0]
    assert os.read(read, 100) == b"0" * 99 + b"\n"
    os.close(read)
    lines.close()  # before the descriptor is closed, whose number the next file would get
    os.close(write)


FULL_DISK = """
import os, resource, signal, sys, time
from keras_ddl.serving.background_lines import BackgroundLines

descriptor, lost = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), []
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # as if the disk had room for ten bytes
lines = BackgroundLines(descriptor, lost.append)
lines.write("one\\n")
lines.write("this is cut\\n")
while not lost:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
lines.write("two\\n")
lines.close()
assert len(lost) == 1, lost
"""


def test_log_has_complete_lines_again_after_a_full_disk(tmp_path: Path) -> None:
    file = tmp_path / "log"
    subprocess.run([sys.executable, "-c", FULL_DISK, file], check=True, timeout=120)
    assert file.read_text().splitlines() == ["one", "this i", "two"]


def code_of(manager: ModelManager, number: int | None = None) -> Code:
    try:
        with manager.use("model", number):
            return Code.OK
    except RequestError as error:
        return error.code


def test_version_is_unavailable_until_loaded_and_not_found_once_removed(tmp_path: Path) -> None:
    errors: list[Exception | None] = [LoadInterrupted("killed"), OSError("no memory"), LoadError("broken"), None]

    async def load(config: ModelConfig, path: Path, version: int) -> Any:
        error = errors.pop(0)
        if error is not None:
            raise error
        return SimpleNamespace(path=path, version=version, error="", busy=0, close=lambda: True)

    async def serve() -> None:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "saved_model.pb").touch()
        manager = ModelManager([ModelConfig("model", tmp_path)], load, retry_seconds=1.0)
        assert code_of(manager) == Code.UNAVAILABLE  # the directory has not been read yet
        for left, state in ((3, State.LOADING), (2, State.LOADING), (1, State.END), (0, State.AVAILABLE)):
            end = time.monotonic() + 60
            while len(errors) > left and time.monotonic() < end:
                await manager.poll()
                await asyncio.sleep(0.01)
            assert [each.state for each in manager.status("model")] == [state]
            expected = {State.AVAILABLE: Code.OK, State.END: Code.NOT_FOUND}.get(state, Code.UNAVAILABLE)
            assert (code_of(manager), code_of(manager, 1), code_of(manager, 2)) == (expected, expected, Code.NOT_FOUND)
        (version,) = manager.status("model")
        version.servable.error = "killed again"
        assert code_of(manager) == Code.UNAVAILABLE and not manager.all_available()
        (shown,) = manager.status("model")
        assert (shown.state, shown.error) == (State.LOADING, "killed again")
        (tmp_path / "1").rename(tmp_path / "bad-1")
        await manager.poll()
        assert code_of(manager) == code_of(manager, 1) == Code.NOT_FOUND

    asyncio.run(serve())
