"""keras-ddl run: how the ranks' output is shown. test_output.py tests it without processes."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from keras_ddl.launch.mpi.mpirun import HYDRA, find
from launch.launching import LIMIT_SECONDS, Started, run_program, write_program

pytestmark = pytest.mark.parallel


def test_run_passes_settings_and_shows_and_saves_output(tmp_path: Path):
    # Ranks write halves of lines in turn, which would be mixed if they were not joined.
    source = """
os.write(2, b"to stderr\\n")
data = sys.stdin.buffer.read()
print(RANK, len(data), data[-4:], *(os.environ.get(n) for n in ("KERAS_DDL_MODE", "ONE", "TWO", "KERAS_DDL_LAUNCHER")))
for i in range(20):
    for half in (f"line {i} of ", f"rank {RANK}\\n"):
        os.write(1, half.encode()); time.sleep(0.01)
if RANK: sys.stdout.write("".join("\\b" * 9 + "\\r" + f"{i + 1}/5 done" for i in range(5)) + "\\n"); sys.stdout.flush()
os.write(1, b"the end has no newline")
here(f"{os.getsid(0)}-{os.getpgid(0)}")
"""
    options = ["--mode", "x:1x3", "--env", "ONE=a=b", "-x", "TWO", "--output-dir", "logs/here"]
    given = {"env": {"TWO": "from outside"}, "input": b"x" * 3_000_000 + b"tail"}
    ended = run_program(tmp_path, source, *options, np=3, **given)
    assert ended.status == 0, ended
    lines = ended.out.splitlines()
    settings = "x:1x3 a=b from outside None"
    for rank, stdin in enumerate(["3000004 b'tail'", "0 b''", "0 b''"]):
        expected = [f"{rank} {stdin} {settings}", *(f"line {i} of rank {rank}" for i in range(20))]
        expected += [*(["5/5 done"] if rank else []), "the end has no newline"]
        prefix = f"[{rank}] " if rank else ""
        mine = [line.removeprefix(prefix) for line in lines if line.startswith(prefix) and (rank or line[0] != "[")]
        assert mine == expected, ended
        log = (tmp_path / "logs" / "here" / f"rank-{rank}.log").read_text()
        assert f"line 19 of rank {rank}\n" in log and "to stderr" in log
    assert sorted(ended.err.splitlines()) == ["[1] to stderr", "[2] to stderr", "to stderr"]
    if find().family != HYDRA:  # MPICH itself creates a session for every rank
        # Linux may delay threads of ranks in different sessions for seconds; and a group can be signalled.
        sessions, groups, _ = zip(*(path.name.split("-") for path in tmp_path.glob("*-*-?")))
        assert (len(sessions), len(set(sessions)), len(set(groups))) == (3, 1, 3)


def test_run_with_an_unread_stdin_ends(tmp_path: Path):
    with Path("/dev/zero").open("rb") as endless:
        ended = Started(["run", "-np", "2", "--", "true"], tmp_path, stdin=endless).finish()
    assert ended.status == 0, ended


def test_run_continues_if_output_cannot_be_saved(tmp_path: Path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-0.log").symlink_to("/dev/full")
    (logs / "rank-1.log").mkdir()  # cannot be opened at all
    ended = run_program(tmp_path, "print('out of', RANK, flush=True)", "--output-dir", "logs")
    assert ended.status == 0 and sorted(ended.out.splitlines()) == ["[1] out of 1", "out of 0"], ended
    assert ended.err.count("rank 0's log file is incomplete: [Errno 28] No space left on device") == 1, ended
    assert ended.err.count("rank 1's output is not saved: [Errno 21] Is a directory") == 1, ended


@pytest.mark.long
def test_run_continues_if_the_timelines_disk_is_full(tmp_path: Path):
    source = """
import numpy as np
from keras_ddl import communicator
communicator.init()
for number in range(2000): communicator.all_reduce_array(np.ones(3, np.float32), name=f"x{number}")
communicator.shutdown()
print("done", flush=True)
"""
    for rank in (0, 1):
        (tmp_path / f"timeline.rank{rank}.json").symlink_to("/dev/full")
    ended = run_program(tmp_path, source, "--env", "KERAS_DDL_TIMELINE=timeline.json")
    assert ended.status == 0 and ended.out.count("done") == 2, ended
    assert "could not be written completely" in ended.err, ended


def test_run_progress_bar_of_rank_0_stays_in_place_and_follows_the_terminals_size(tmp_path: Path):
    source = """
if RANK == 0:
    print(sys.stdout.isatty(), sys.stderr.isatty(), *os.get_terminal_size(), flush=True)
    for i in range(10):
        sys.stdout.write(f"\\rstep {i + 1}/10"); sys.stdout.flush(); here(f"step{i}"); time.sleep(0.1)
        while i == 8 and os.get_terminal_size().columns != 77: time.sleep(0.01)
    print(" done")
else:
    print(sys.stdout.isatty())
    while not Path("step3-0").exists(): time.sleep(0.01)
    print("in between", flush=True)
"""

    def resize(fd, process):
        os.system(f"stty cols 77 < {os.ttyname(fd)}")
        process.send_signal(signal.SIGWINCH)  # because it is not the controlling terminal

    status, shown = on_terminal(
        ["run", "-np", "2", "python", write_program(tmp_path, source)],
        tmp_path,
        rows=33,
        columns=111,
        when=(lambda shown: b"in between" in shown, resize),
    )
    text = shown.decode()
    assert status == 0, text
    assert "True True 111 33\r\n" in text and "[1] False\r\n" in text, text
    # The bar's line is erased, the other line is shown, and the bar is drawn again.
    assert re.search(r"step (\d+)/10\r\x1b\[K\[1\] in between\r\n(\rstep |step )?\1", text), text
    assert text.endswith("step 10/10 done\r\n"), text


@pytest.mark.long
def test_run_shows_the_new_rank_0_in_place_of_the_lost_one(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
import keras_ddl
keras_ddl.init()
if RANK == 0:
    print("\\rbar 1/2", end="", flush=True)
keras_ddl.barrier()
if RANK == 0:
    os.kill(os.getpid(), 9)
try:
    keras_ddl.barrier()
except keras_ddl.errors.RankLostError:
    keras_ddl.regroup()
print("\\rbar 2/2", RANK, keras_ddl.rank(), sys.stdin.read() == "", os.get_terminal_size().columns)
""",
    )
    arguments = ["run", "-np", "1:3", "python", program]
    status, shown = on_terminal(arguments, tmp_path, rows=33, columns=111)
    assert status == 0, shown
    assert b"\rbar 2/2 1 0 True 111\r\n" in shown and b"[1]" not in shown, shown
    assert b"[1, was 2] bar 2/2 2 1 True 111\r\n" in shown, shown


def on_terminal(arguments, folder, *, rows, columns, when=None):
    """Runs keras-ddl with a terminal as stdin, stdout and stderr. Returns (status, its output).

    `when`: a condition on the output so far, and a function to call once, with the terminal and the process.
    """
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "rows", str(rows), "cols", str(columns)], stdin=theirs, check=True)
    started = Started(arguments, folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    shown = b""
    deadline = time.monotonic() + LIMIT_SECONDS
    while started.process.poll() is None and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.05)[0]:
            shown += os.read(ours, 65536)
        if when is not None and when[0](shown):
            when[1](theirs, started.process)
            when = None
    while select.select([ours], [], [], 0.1)[0]:
        shown += os.read(ours, 65536)
    os.close(theirs)
    os.close(ours)
    return started.finish().status, shown
