"""Strangers on the launcher's port, and a stranger in place of the launcher, achieve nothing."""

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from keras_ddl.config import Seconds
from keras_ddl.errors import LaunchError
from keras_ddl.launch import address as address_module
from keras_ddl.launch.address import Address
from keras_ddl.link import listener as listener_module
from keras_ddl.link.channel import Channel
from keras_ddl.link.handshake import sign, verify
from keras_ddl.link.kinds import FROM_UNPROVEN_CALLER, FROM_UNPROVEN_LISTENER, NONCE_BYTES, Kind
from keras_ddl.link.listener import Listener
from launch.launching import LIMIT_SECONDS, environment, eventually, processes, start_program

HELLO = {"nonce": "00" * 32, "rank": 0, "size": 1, "host": "h", "pid": 1}


def stranger(address: Address) -> Channel:
    """Connects as this user, because another user cannot connect if all ranks are on one host."""
    return Channel(address_module.connect(address), FROM_UNPROVEN_LISTENER)


def wait_for_frame(channel: Channel) -> tuple[Kind, bytes] | None:
    """Returns the next frame; None: the other side has closed the connection."""
    channel.sock.settimeout(LIMIT_SECONDS)
    while not channel.closed:
        for frame in channel.read():
            return frame
    return None


@pytest.fixture(params=["a UNIX socket", "TCP"])
def over(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Returns an argument for `address.listen`."""
    return tmp_path / "socket" if request.param == "a UNIX socket" else None


@pytest.fixture
def listening(over: Path | None) -> Iterator[tuple[Listener, Address, int]]:
    """Yields a listener for 3 ranks, its address, and its descriptor."""
    listener, address = address_module.listen(over)
    acceptor = Listener(listener, address.token, 3)
    yield acceptor, address, listener.fileno()
    acceptor.close()


def nonce_of(channel: Channel) -> bytes:
    kind, nonce = wait_for_frame(channel)
    assert kind is Kind.NONCE
    return nonce


def is_dismissed(channel: Channel) -> bool:
    return bool(nonce_of(channel)) and wait_for_frame(channel) is None


WITHOUT_PROOF = {
    "nested beyond all limits": b"[" * FROM_UNPROVEN_CALLER[Kind.HELLO],
    "no JSON": b"\xff" * 100,
    "empty": b"",
    "a proof for nothing": bytes(32),
    "of another job": sign("00" * 32, "caller", bytes(32), HELLO),
}


@pytest.mark.parametrize("what", WITHOUT_PROOF)
def test_acceptor_dismisses_a_caller_without_proof(what: str, listening: tuple[Listener, Address, int]):
    acceptor, address, listener = listening
    channel = stranger(address)
    assert eventually(lambda: acceptor.serve(listener) is None and acceptor.has_unproven)
    nonce_of(channel)
    payload = WITHOUT_PROOF[what]
    channel.sock.sendall(struct.pack("!BQ", Kind.HELLO, len(payload)) + payload)
    assert eventually(lambda: not any(acceptor.serve(fd) for fd in acceptor.fds) and not acceptor.has_unproven)
    assert wait_for_frame(channel) is None


@pytest.mark.parallel
def test_nobody_can_connect_after_all_ranks(tmp_path: Path):
    source = "here('up')\nwhile not Path('go').exists(): time.sleep(0.02)\nprint('fine')"
    started = start_program(tmp_path, source)
    with pytest.raises(LaunchError, match="refused"):
        stranger(address_of(started.mark))
    (tmp_path / "go").touch()
    ended = started.finish()
    assert (ended.status, ended.err) == (0, "") and sorted(ended.out.splitlines()) == ["[1] fine", "fine"], ended


def test_acceptor_drops_a_connection_without_proof_in_time(
    monkeypatch: pytest.MonkeyPatch, listening: tuple[Listener, Address, int]
):
    acceptor, address, listener = listening
    early = stranger(address)
    assert eventually(lambda: acceptor.serve(listener) is None and acceptor.has_unproven)
    monkeypatch.setattr(Seconds, "PROOF", -1.0)
    late = stranger(address)
    assert eventually(lambda: acceptor.serve(listener) is None and len(acceptor.fds) == 3)
    acceptor.tick()
    assert len(acceptor.fds) == 2 and is_dismissed(late)
    acceptor.close()
    assert acceptor.fds == [] and is_dismissed(early)


def test_acceptor_drops_the_oldest_when_too_many_wait(listening: tuple[Listener, Address, int]):
    acceptor, address, listener = listening
    most = 3 + listener_module._MAX_STRANGERS
    strangers = []
    for _ in range(most + 2):
        strangers.append(stranger(address))
        before = acceptor.fds
        assert eventually(lambda before=before: acceptor.serve(listener) is None and acceptor.fds != before)
    assert len(acceptor.fds) == 1 + most and all(map(is_dismissed, strangers[:2]))
    for channel in strangers:
        channel.close()


def test_acceptor_admits_a_rank_whose_proof_arrives_in_pieces(listening: tuple[Listener, Address, int]):
    acceptor, address, listener = listening
    rank = stranger(address)
    assert eventually(lambda: acceptor.serve(listener) is None and acceptor.has_unproven)
    payload = sign(address.token, "caller", nonce_of(rank), HELLO)
    found = None
    for byte in struct.pack("!BQ", Kind.HELLO, len(payload)) + payload:
        assert found is None
        rank.sock.sendall(bytes([byte]))
        (fd,) = [fd for fd in acceptor.fds if fd != listener]
        found = acceptor.serve(fd)
    assert found is not None and found.hello == HELLO and not acceptor.has_unproven
    found.channel.close()
    rank.close()


def address_of(mark: str) -> Address:
    """Returns the address of the job's launcher, from the environment of its wrappers; no command line has it."""
    for pid, command in processes(mark).items():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for variable in variables:
            if variable.startswith(b"KERAS_DDL_LAUNCHER="):
                address = Address.parse(variable.partition(b"=")[2].decode())
                assert address.token not in command
                return address
    raise AssertionError(processes(mark))


def test_wrapper_pushed_out_by_strangers_connects_again(tmp_path: Path):
    with waiting_wrapper(tmp_path, "true", pushed_out=True) as (process, channel, hello, _):
        assert hello["rank"] == 0
        channel.close()
        assert process.wait(LIMIT_SECONDS) == 1


@pytest.mark.parametrize("answer", ["a wrong proof", "no proof", "nested beyond all limits"])
def test_wrapper_runs_nothing_for_a_stranger(answer: str, tmp_path: Path):
    with waiting_wrapper(tmp_path, "touch", str(tmp_path / "made")) as (process, channel, hello, _):
        assert set(hello) - {"facts"} == {"nonce", "rank", "size", "host", "pid"}
        if answer == "a wrong proof":
            welcome = {"job": "x", "host": "", "environment": {}, "directory": "/", "terminal": {}, "kept": None}
            channel.send(Kind.WELCOME, sign("00" * 32, "listener", bytes.fromhex(hello["nonce"]), welcome))
        elif answer == "nested beyond all limits":
            channel.send(Kind.WELCOME, b"[" * 200_000)
        channel.send(Kind.START)
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1 and "Traceback" not in said, said
    assert not (tmp_path / "made").exists()


@contextlib.contextmanager
def waiting_wrapper(
    tmp: Path, *program: str, cwd: Path | None = None, before: Sequence[str] = (), pushed_out: bool = False
) -> Iterator[tuple[subprocess.Popen[str], Channel, dict[str, Any], str]]:
    """Returns the wrapper of `program`, its connection to this test, its hello, and the token of its job.

    The listener is closed. pushed_out: the wrapper's first connection was closed.
    """
    listener, address = address_module.listen(None)
    listener.settimeout(LIMIT_SECONDS)
    env = environment("-", tmp, {"KERAS_DDL_LAUNCHER": str(address), "PMI_RANK": "0", "PMI_SIZE": "1"})
    command = [*before, sys.executable, "-m", "keras_ddl.launch.mpi.rank_proxy", "--", *program]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with listener, subprocess.Popen(command, cwd=cwd, env=env, text=True, **streams) as process:
        try:
            if pushed_out:
                listener.accept()[0].close()
            channel = Channel(listener.accept()[0], FROM_UNPROVEN_CALLER)
            listener.close()
            nonce = os.urandom(NONCE_BYTES)
            channel.send(Kind.NONCE, nonce)
            kind, payload = wait_for_frame(channel)
            assert kind is Kind.HELLO
            yield process, channel, verify(address.token, "caller", nonce, payload), address.token
        finally:
            process.kill()
