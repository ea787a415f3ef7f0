"""keras-ddl run: SIGINT and SIGTERM end everything; a killed launcher leaves nothing behind.

test_supervisor.py tests the launcher's decisions. Here are its wrappers and real processes.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from launch.launching import STARTERS, eventually, processes, start_program, starter

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

SLEEPER = "here('up')\ntime.sleep(600)"


# A launcher whose grace period after Ctrl-C exceeds a test's time limit.
PATIENT = """
import sys
from keras_ddl import config
config.Seconds.INTERRUPT_GRACE = 2000.0
from keras_ddl.cli import main
sys.exit(main())
"""


def test_run_interrupt_lets_ranks_clean_up_and_ends(tmp_path: Path):
    started = start_program(
        tmp_path,
        """
try:
    here("up"); time.sleep(600)
except KeyboardInterrupt:
    print("cleaning up", flush=True); time.sleep(0.5); here("clean"); raise
""",
    )
    started.process.send_signal(signal.SIGINT)
    ended = started.finish()
    assert ended.status == 130, ended
    assert (tmp_path / "clean-0").exists() and (tmp_path / "clean-1").exists(), ended
    assert "Traceback" not in ended.err, ended
    assert "[1] cleaning up" in ended.out


NOTICED = """
import signal
def end(number, frame):
    if RANK == 1 and sys.argv[1:] == ["slow"]: time.sleep(600)
    here(f"saved-{number}"); os._exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, end)
Path(f"ppid-{RANK}").write_text(str(os.getppid()))
here("up"); time.sleep(600)
"""


def test_run_sigterm_gives_ranks_time_to_save_then_kills_them(tmp_path: Path):
    started = start_program(tmp_path, NOTICED, "--grace", "3", words=["slow"])
    started.process.terminate()
    ended = started.finish()
    assert ended.status == 75, ended
    assert (tmp_path / "saved-15-0").exists() and not (tmp_path / "saved-15-1").exists(), ended
    assert "the ranks ended with status 75 and ask to be started again" in ended.err, ended


def test_run_sigusr1_is_forwarded_by_the_launcher_and_by_a_wrapper(tmp_path: Path):
    # Slurm and mpirun send it to the processes that they started, the wrappers.
    started = start_program(tmp_path, NOTICED)
    os.kill(int((tmp_path / "ppid-1").read_text()), signal.SIGUSR1)
    started.wait_for(tmp_path / "saved-10-1")
    assert not (tmp_path / "saved-10-0").exists()
    started.process.send_signal(signal.SIGUSR1)
    ended = started.finish()
    assert ended.status == 75 and (tmp_path / "saved-10-0").exists(), ended


def test_run_second_interrupt_kills_at_once(tmp_path: Path):
    # With MPI, because no process is left to remove its shared memory.
    started = start_program(
        tmp_path,
        """
import signal
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(1) == 2
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
here("up")
while True: time.sleep(1)
""",
        main=("-c", PATIENT),
        env={"KERAS_DDL_MPIRUN": "mpirun"},
    )
    started.process.send_signal(signal.SIGINT)
    pending = Path(f"/proc/{started.process.pid}/status")
    assert eventually(lambda: "ShdPnd:\t0000000000000000" in pending.read_text())  # otherwise both would count as one
    time.sleep(0.3)
    started.process.send_signal(signal.SIGINT)
    ended = started.finish()
    assert ended.status == 130, ended
    assert started.segments  # removed, otherwise `finish` would have failed


@pytest.mark.parametrize("env", STARTERS)
def test_run_stubborn_mpirun_is_killed(env: dict[str, str], tmp_path: Path):
    # As seen on a cluster whose link was down, mpirun ignores SIGTERM. A stopped process stands for it.
    started = start_program(tmp_path, SLEEPER, env=env)
    os.kill(starter(started.mark), signal.SIGSTOP)
    started.process.terminate()
    ended = started.finish()
    assert ended.status == 143, ended


@pytest.mark.parametrize("env", STARTERS)
def test_run_killed_launcher_leaves_no_process(env: dict[str, str], tmp_path: Path):
    started = start_program(tmp_path, SLEEPER, "--restarts", "5", env=env)
    started.process.kill()
    started.process.wait()
    assert eventually(lambda: not processes(started.mark)), processes(started.mark)
    assert not list(started.tmp.iterdir())
    started.process.communicate()
