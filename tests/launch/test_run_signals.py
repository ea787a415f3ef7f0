"""keras-ddl run: SIGINT and SIGTERM end everything; a launcher that is killed leaves nothing."""

import os
import signal
import time
from pathlib import Path

import pytest

from launch.launching import STARTERS, Started, eventually, processes, starter, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

SLEEPER = "here('up')\ntime.sleep(600)"
STUBBORN = """
import signal
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
here("up")
while True: time.sleep(1)
"""


# A launcher that gives ranks longer to clean up after Ctrl-C than a test may take.
PATIENT = """
import sys
from keras_ddl.launch import supervisor
supervisor._INTERRUPT_GRACE_SECONDS = 2000.0
from keras_ddl.cli import main
sys.exit(main())
"""


def start(folder: Path, program: str, **options: object) -> Started:
    started = Started(["run", "-np", "2", "python", write_program(folder, program)], folder, **options)
    started.wait_for(folder / "up-0", folder / "up-1")
    started.began = time.monotonic()
    return started


def test_run_interrupt_lets_ranks_clean_up_and_ends(tmp_path: Path):
    started = start(
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


def test_run_sigterm_ends_the_job(tmp_path: Path):
    started = start(tmp_path, SLEEPER)
    started.process.terminate()
    ended = started.finish()
    assert ended.status == 143, ended


def test_run_interrupt_kills_ranks_that_ignore_it(tmp_path: Path):
    started = start(tmp_path, STUBBORN)
    started.process.send_signal(signal.SIGINT)
    ended = started.finish()
    assert ended.status == 130, ended
    assert ended.seconds > 4, ended  # what ranks get to clean up


def test_run_second_interrupt_kills_at_once(tmp_path: Path):
    # With MPI: nobody is left to remove its shared memory.
    started = start(
        tmp_path,
        "from mpi4py import MPI\nassert MPI.COMM_WORLD.allreduce(1) == 2\n" + STUBBORN,
        main=("-c", PATIENT),
        env={"KERAS_DDL_MPIRUN": "mpirun"},
    )
    started.process.send_signal(signal.SIGINT)
    pending = Path(f"/proc/{started.process.pid}/status")
    assert eventually(lambda: "ShdPnd:\t0000000000000000" in pending.read_text())  # else both would count as one
    time.sleep(0.3)
    started.process.send_signal(signal.SIGINT)
    ended = started.finish()
    assert ended.status == 130, ended
    assert started.segments  # which are gone, or `finish` would have said so


@pytest.mark.parametrize("env", STARTERS)
def test_run_stubborn_mpirun_is_killed(env: dict[str, str], tmp_path: Path):
    # As measured on a cluster whose link was down: mpirun ignores SIGTERM. A stopped process is such a one.
    started = start(tmp_path, SLEEPER, env=env)
    signal_process(starter(started.mark), signal.SIGSTOP)
    started.process.terminate()
    ended = started.finish()
    assert ended.status == 143, ended


@pytest.mark.parametrize("env", STARTERS)
def test_run_killed_launcher_leaves_no_process(env: dict[str, str], tmp_path: Path):
    started = start(tmp_path, SLEEPER, env=env)
    started.process.kill()
    started.process.wait()
    assert eventually(lambda: not processes(started.mark)), processes(started.mark)
    assert not list(started.tmp.iterdir())
    started.process.communicate()


def signal_process(pid: int, number: int) -> None:
    os.kill(pid, number)


NOTICED = """
import signal
def end(number, frame):
    time.sleep(3)  # longer than ranks get without --grace
    here(f"saved-{number}"); os._exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, end)
here("up"); time.sleep(600)
"""


def test_run_grace_gives_ranks_time_to_save_and_their_status_is_the_jobs(tmp_path: Path):
    started = Started(["run", "-np", "2", "--grace", "30", "python", write_program(tmp_path, NOTICED)], tmp_path)
    started.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    started.process.terminate()
    ended = started.finish()
    assert ended.status == 75, ended
    assert (tmp_path / "saved-15-0").exists() and (tmp_path / "saved-15-1").exists(), ended
    assert "the ranks ended with status 75, to be started again" in ended.err, ended


def test_run_grace_that_is_over_kills(tmp_path: Path):
    slow = NOTICED.replace("time.sleep(3)", "time.sleep(600)")
    started = Started(["run", "-np", "2", "--grace", "0.5", "python", write_program(tmp_path, slow)], tmp_path)
    started.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    started.process.terminate()
    ended = started.finish()
    assert ended.status == 143 and not (tmp_path / "saved-15-0").exists(), ended


def test_run_passes_sigusr1_on_and_a_restart_follows_status_75(tmp_path: Path):
    program = write_program(tmp_path, "if os.environ['KERAS_DDL_RESTART'] == '1': sys.exit(0)\n" + NOTICED)
    started = Started(["run", "-np", "2", "--restarts", "1", "python", program], tmp_path)
    started.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    started.process.send_signal(signal.SIGUSR1)
    ended = started.finish()
    assert ended.status == 0, ended
    assert (tmp_path / "saved-10-0").exists() and (tmp_path / "saved-10-1").exists(), ended
    assert "restart 1 of 1, with 2 ranks (the ranks ended with status 75)" in ended.err, ended


def test_run_wrapper_passes_sigusr1_on_to_its_program(tmp_path: Path):
    # As Slurm and mpirun send it: to the processes that they know.
    program = write_program(tmp_path, "Path(f'ppid-{RANK}').write_text(str(os.getppid()))\n" + NOTICED)
    started = Started(["run", "-np", "1", "python", program], tmp_path)
    started.wait_for(tmp_path / "up-0")
    signal_process(int((tmp_path / "ppid-0").read_text()), signal.SIGUSR1)
    ended = started.finish()
    assert ended.status == 75 and (tmp_path / "saved-10-0").exists(), ended
