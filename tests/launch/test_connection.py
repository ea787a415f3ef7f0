"""Strangers on the launcher's port, and a stranger in the launcher's place: neither gets anything."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keras_ddl.launch import control
from keras_ddl.launch.control import Address, Channel, Kind
from launch.launching import Started, environment, eventually, processes, write_program


def wait_for_frame(channel: Channel) -> tuple[Kind, bytes] | None:
    """The next frame; None when the other side has closed the connection."""
    channel.sock.settimeout(10)
    while not channel.closed:
        for frame in channel.read():
            return frame
    return None


@pytest.mark.parallel
def test_launcher_gives_nothing_to_a_stranger(tmp_path: Path):
    program = write_program(tmp_path, "here('up')\nwhile not Path('go').exists(): time.sleep(0.02)\nprint('fine')")
    started = Started(["run", "-np", "2", "python", program], tmp_path)
    started.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    address = address_of(started.mark)
    wrong = control.proof("00" * 32, "rank", b"?")
    hello = {"proof": wrong, "nonce": "00", "rank": 0, "size": 2, "host": "h", "pid": 1}
    for message in (hello, {**hello, "rank": 99}, {**hello, "rank": None}, {}):
        channel = Channel(socket.create_connection(("127.0.0.1", address.port), timeout=10))
        kind, _ = wait_for_frame(channel)
        assert kind is Kind.NONCE
        channel.send(Kind.HELLO, message)
        assert wait_for_frame(channel) is None
    # One who knows the token, but comes as a rank that is there already.
    channel = Channel(socket.create_connection(("127.0.0.1", address.port), timeout=10))
    _, nonce = wait_for_frame(channel)
    channel.send(Kind.HELLO, {**hello, "proof": control.proof(address.token, "rank", nonce)})
    assert wait_for_frame(channel) is None
    (tmp_path / "go").touch()
    ended = started.finish()
    assert ended.status == 0 and sorted(ended.out.splitlines()) == ["[1] fine", "fine"], ended


@pytest.mark.parallel
def test_launcher_starts_a_rank_only_for_a_proof(tmp_path: Path):
    # An mpirun that starts nothing: the ranks are played here.
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 5" || exec sleep 600\n')
    mpirun.chmod(0o755)
    started = Started(["run", "-np", "1", "--mpirun", str(mpirun), "--", "true"], tmp_path)
    assert eventually(lambda: any("sleep 600" in command for command in processes(started.mark).values()), 20)
    address = address_of(started.mark)
    hello = {"nonce": "00", "rank": 0, "size": 1, "host": "h", "pid": 1}
    for token, welcome in (("00" * 32, False), (address.token, True)):
        channel = Channel(socket.create_connection(("127.0.0.1", address.port), timeout=10))
        _, nonce = wait_for_frame(channel)
        channel.send(Kind.HELLO, {**hello, "proof": control.proof(token, "rank", nonce)})
        frame = wait_for_frame(channel)
        assert (frame is not None) == welcome
    assert frame[0] is Kind.WELCOME
    assert json.loads(frame[1])["proof"] == control.proof(address.token, "launcher", b"\0")
    channel.close()
    ended = started.finish()
    assert ended.status == 1 and "rank 0 on host h failed first" in ended.err, ended


def address_of(mark: str) -> Address:
    """Where the job's launcher listens: in the environment of its wrappers, and nowhere on a command line."""
    for pid, command in processes(mark).items():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for variable in variables:
            if variable.startswith(b"KERAS_DDL_LAUNCHER="):
                address = Address.parse(variable.partition(b"=")[2].decode())
                assert address.token not in command
                return address
    raise AssertionError(processes(mark))


@pytest.mark.parametrize("answer", ["a wrong proof", "no proof"])
def test_wrapper_runs_nothing_for_a_stranger(answer: str, tmp_path: Path):
    listener, address = control.listen(several_hosts=False)
    env = environment("-", tmp_path, {"KERAS_DDL_LAUNCHER": str(address), "PMI_RANK": "0", "PMI_SIZE": "1"})
    wrapper = subprocess.Popen(
        [sys.executable, "-m", "keras_ddl.launch.rank_process", "--", "touch", str(tmp_path / "made")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    listener.settimeout(20)
    channel = Channel(listener.accept()[0])
    channel.send(Kind.NONCE, os.urandom(32))
    kind, payload = wait_for_frame(channel)
    assert kind is Kind.HELLO and set(json.loads(payload)) == {"proof", "nonce", "rank", "size", "host", "pid"}
    if answer == "a wrong proof":
        welcome = {"proof": "00" * 32, "job": "x", "host": "", "environment": {}, "directory": "/", "terminal": {}}
        channel.send(Kind.WELCOME, welcome | {"stdin": False, "sends_file": False})
    channel.send(Kind.START)
    said, _ = wrapper.communicate(timeout=20)
    assert wrapper.returncode == 1, said
    assert not (tmp_path / "made").exists()
    listener.close()
