"""keras-ddl run when its output can no longer be read: the job ends or continues, and leaves nothing behind."""

import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from launch.launching import Started, run_program, start_program, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

# Uses the ranks' shared memory, too.
TALKS = """
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
here("up")
while True:
    print("talks", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("what", ["terminal", "reader"])
def test_run_ends_and_leaves_nothing_if_nobody_reads_its_output(what: str, tmp_path: Path):
    ours, theirs = pty.openpty() if what == "terminal" else os.pipe()
    streams = {"stdout": theirs, "stderr": theirs} if what == "terminal" else {"stdout": theirs}
    started = start_program(tmp_path, TALKS, **streams)
    os.close(theirs)
    os.close(ours)
    ended = started.finish()
    assert ended.status == 128 + (signal.SIGHUP if what == "terminal" else signal.SIGPIPE), ended


ENDS = """
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
sys.exit(3 if RANK == 1 else 0)
"""


@pytest.mark.parametrize("closed", [">&-", pytest.param(">&- 2>&- <&-", marks=pytest.mark.long)])
def test_run_works_without_a_standard_stream(closed: str, tmp_path: Path):
    words = [sys.executable, "-m", "keras_ddl.cli", "run", "-np", "2", "python", write_program(tmp_path, ENDS)]
    shell = ["-c", f"import os; os.execvp('sh', ['sh', '-c', 'exec \"$@\" {closed}', 'sh', *{words!r}])"]
    ended = Started([], tmp_path, main=shell).finish()
    assert ended.status == 3 and "Traceback" not in ended.err, ended
    assert "2>&-" in closed or "ended with exit status 3" in ended.err, ended


def test_run_continues_if_its_output_cannot_be_stored(tmp_path: Path):
    with Path("/dev/full").open("wb") as full:
        ended = run_program(tmp_path, ENDS, stdout=full)
    assert ended.status == 3, ended
    assert "stdout is lost, because it cannot be written: [Errno 28] No space left on device" in ended.err, ended
    assert "[1] err" in ended.err and "ended with exit status 3" in ended.err, ended


@pytest.mark.long
def test_run_survives_its_terminal_if_hangups_are_ignored(tmp_path: Path):
    # As with nohup.
    ours, theirs = pty.openpty()
    source = """
here("up")
while not os.path.exists("lost"): time.sleep(0.05)
for _ in range(5): print("talks", flush=True)
here("end")
sys.exit(4)
"""
    ignore = "import signal, runpy; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    run_cli = ignore + "runpy.run_module('keras_ddl.cli', run_name='__main__', alter_sys=True)"
    started = start_program(tmp_path, source, main=("-c", run_cli), stdout=theirs)
    os.close(theirs)
    os.close(ours)
    (tmp_path / "lost").touch()
    ended = started.finish()
    assert ended.status == 4, ended
    assert (tmp_path / "end-0").exists() and (tmp_path / "end-1").exists(), ended
