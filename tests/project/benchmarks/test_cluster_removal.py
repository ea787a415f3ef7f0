"""A run on the emulated cluster that is ended in the middle leaves no namespace, process or file behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.test_cluster import PROGRAM
from harness.rank_tests import find_mpirun

pytestmark = [pytest.mark.parallel, pytest.mark.alone]


def spaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    return [line.split()[0] for line in listed if line.startswith(f"kddl{pid}-")]


def processes_in(space: str) -> set[int]:
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout
    return {int(word) for word in listed.split()}


def wait_for(condition, process: subprocess.Popen) -> None:
    """Waits until condition() is true; skips the test if `process` reports that clusters cannot be emulated."""
    end = time.monotonic() + 300
    while not condition():
        if process.poll() == 2:
            pytest.skip(process.stderr.read().strip())
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("signals", "running", "status"),
    [
        ((signal.SIGINT, signal.SIGINT), True, 130),
        pytest.param((signal.SIGTERM,), True, 1, marks=pytest.mark.long),
        pytest.param((signal.SIGTERM,), False, 1, marks=pytest.mark.long),
    ],
    ids=["Ctrl-C twice", "SIGTERM", "SIGTERM while it is built"],
)
def test_run_ended_by_a_signal_leaves_nothing_behind(signals, running, status):
    path = f"{Path(find_mpirun()).parent}{os.pathsep}{os.environ['PATH']}"
    options = ("--hosts", "2", "--ranks-per-host", "1", "--rate", "50mbit", "--sizes", "100M")
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *options],
        env={**os.environ, "PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    last_host = f"kddl{process.pid}-h1"
    try:
        # mpirun's daemon and the rank, or (while it is built) the first host.
        wait_for(lambda: len(processes_in(last_host)) >= 2 if running else len(spaces_of(process.pid)) >= 2, process)
        inside = {pid for space in spaces_of(process.pid) for pid in processes_in(space)}
        for number in signals:
            os.killpg(process.pid, number)  # a terminal also sends it to the children
            time.sleep(0.1)
        assert process.wait(120) == status, process.stderr.read()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stderr.close()
    assert spaces_of(process.pid) == []
    end = time.monotonic() + 60  # lets init reap the killed processes
    while (left := [pid for pid in inside if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []
    assert list(Path(tempfile.gettempdir()).glob(f"kddl{process.pid}-*")) == []
