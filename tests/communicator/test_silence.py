"""Missing ranks: rank 0 warns and names them, their hosts and their main threads' lines; so does the error."""

import os
import re
import socket
import subprocess
import time

import pytest

from harness.rank_tests import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def silent_ranks(folder):
    import ctypes
    from pathlib import Path

    import keras_ddl
    from keras_ddl import errors

    keras_ddl.init()
    late = keras_ddl.rank() == keras_ddl.size() - 1

    def loads_data():
        time.sleep(2.5)

    def keeps_the_interpreter():
        ctypes.PyDLL(None).sleep(4)

    def is_suspended():
        subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), 19)

    for number, step in enumerate((loads_data, keeps_the_interpreter, is_suspended)):
        if late:
            step()
        keras_ddl.barrier(f"scene {number}")
    while late and len(list(Path(folder).glob("given-up-*"))) < keras_ddl.size() - 1:
        time.sleep(0.01)
    started = time.monotonic()
    with pytest.raises(errors.DeadlineError) as caught:
        keras_ddl.barrier("given up")
    seconds = time.monotonic() - started
    Path(folder, f"given-up-{keras_ddl.rank()}").touch()
    keras_ddl.barrier("after")
    return str(caught.value), seconds, os.getpid()


def test_missing_rank_is_reported_with_its_host_and_line(tmp_path):
    env = {"KERAS_DDL_WARN_AFTER_SECONDS": "1", "KERAS_DDL_DEADLINE_SECONDS": "8"}
    outcome = run_ranks(silent_ranks, 3, args=(str(tmp_path),), env=env).check()
    host, pid = socket.gethostname(), outcome.ranks[-1].result[2]
    who = rf"Rank 2 on host {re.escape(host)} \(process {pid}\)"
    warnings = re.findall(r"keras_ddl: barrier 'barrier/(.*?)' (.*)", outcome.ranks[0].stderr)
    expected = [
        ("scene 0", rf"{who} is at .*test_silence\.py:\d+ in silent_ranks\.loads_data\."),
        ("scene 1", rf"{who} is alive, but its Python does not answer"),
        ("scene 2", rf"{who} is stopped"),
        ("given up", rf"{who} is at .*test_silence\.py:\d+ in silent_ranks(\.| \(inside )"),
    ]
    for name, text in expected:
        matching = [message for scene, message in warnings if scene == name]
        assert matching, (name, outcome.text())
        # In a later warning, if a rank was late to start or to reply.
        where = "for rank(s) 2; rank(s) 0, 1 have arrived."
        assert any(where in each and re.search(text, each) for each in matching), (text, matching)
        assert len(matching) <= 4, matching  # after 1, 2, 4 and 8 s, not at every poll
    for number, rank in enumerate(outcome.ranks):
        message, seconds, _ = rank.result
        assert re.search(expected[3][1], message), message
        assert "for rank(s) 2" in message
        if number != 2:
            assert 8 <= seconds < 60, seconds
    for rank in outcome.ranks[1:]:
        assert "keras_ddl:" not in rank.stderr


def stops_inside():
    """Rank 0 of three stops for a while in the middle of an all-reduce, then the last rank for too long."""
    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    keras_ddl.init()
    rank = keras_ddl.rank()
    pids = keras_ddl.all_gather_object(os.getpid())
    # Enough large calls that all ranks are inside one when the victim stops; names are agreed on before.
    data = np.ones(48 << 20, np.float32)
    communicator.all_reduce_array(data, out=data, name="data")
    for victim, seconds in ((0, 2.5), (2, 9)):
        if rank == victim:  # another process stops it, because its own threads may be late on a busy machine
            script = f"read go; sleep 0.1; kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
            stopping = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE)
        keras_ddl.barrier()
        if rank == victim:
            stopping.stdin.write(b"go\n")
            stopping.stdin.close()
        try:
            for _ in range(12):
                communicator.all_reduce_array(data, out=data, name="data")
            keras_ddl.all_gather_object(None, name="in step")
            message = "none"
        except errors.RankMismatchError:
            raise
        except errors.KerasDdlError as error:
            message = f"{type(error).__name__}: {error}"
    return message, pids


@pytest.mark.long
@pytest.mark.parametrize("mode", ["p", "x:1x3"])
def test_rank_stopped_inside_a_collective_is_reported(mode):
    env = {"KERAS_DDL_WARN_AFTER_SECONDS": "1", "KERAS_DDL_DEADLINE_SECONDS": "6"}
    outcome = run_ranks(stops_inside, 3, mode=mode, env=env)
    messages, pids = [rank.result[0] for rank in outcome.ranks], outcome.ranks[0].result[1]
    host = re.escape(socket.gethostname())
    everything = "".join(rank.stderr for rank in outcome.ranks)
    running = r"keras_ddl: .*'all_reduce_array/data'.* is running, but has made no progress for 1 s: (.*)"
    inside = re.findall(running, everything)
    stopped = rf"Rank 0 on host {host} \(process {pids[0]}\) is stopped"
    assert any(re.search(stopped, text) for text in inside), everything
    if mode == "p":  # one rank reports for its host
        assert len(inside) <= 4, inside
    for message in messages[:2]:
        assert re.search(rf"Rank 2 on host {host} \(process {pids[2]}\) is stopped", message), messages
    assert any(message.startswith("DeadlineError") for message in messages), messages
