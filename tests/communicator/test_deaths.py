"""Ranks that die, stop or become unreachable: an error on every survivor in time, and no shared memory left behind.

mpirun ends a job as soon as one of its processes dies. To test the survivors' own detection, the tests start ranks with
mpirun but stop mpirun before they kill a rank.
"""

import os
import re
import signal
import time

import pytest

from harness.emulated_hosts import can_make_namespaces
from harness.rank_tests import find_mpirun, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

# For ranks in PID namespaces, which cannot stop mpirun themselves. No rank is the first process of its namespace,
# because no signal from inside can kill that one.
IN_NAMESPACES = """
if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then
    (
        until [ -e "$FOLDER/stop" ]; do sleep 0.05; done
        kill -STOP $PPID
        touch "$FOLDER/stopped"
        until [ -e "$FOLDER/survivor-0" ] && [ -e "$FOLDER/survivor-2" ]; do sleep 0.1; done
        kill -CONT $PPID
    ) &
fi
unshare --pid --fork --mount-proc sh -c '"$@"; exit $?' sh "$@"
"""


def loses_a_rank(victim, scene, in_namespaces, folder):
    """Every survivor writes the error, and how many seconds after the death it was raised."""
    import threading
    from pathlib import Path

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    keras_ddl.init()
    rank = keras_ddl.rank()
    keras_ddl.barrier()
    data = np.ones(16 << 20, np.float32)
    dead = Path(folder, "dead")

    def die():
        dead.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        if in_namespaces:
            Path(folder, "stop").touch()
            while not Path(folder, "stopped").exists():
                time.sleep(0.01)
        else:
            os.kill(os.getppid(), signal.SIGSTOP)
        threading.Timer(0.3, die).start()
        while scene != "inside":
            time.sleep(0.1)
    try:
        while scene == "inside":
            communicator.all_reduce_array(data, name="data", out=data)
        while scene == "idle" and not dead.exists():
            time.sleep(0.01)
        if scene == "joined":
            keras_ddl.join()
        else:
            keras_ddl.barrier("never complete")
        message = "no error"
    except errors.KerasDdlError as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - float(dead.read_text())
    part = Path(folder, f"part-{rank}")
    part.write_text(f"{seconds:.3f} {message}")
    part.rename(Path(folder, f"survivor-{rank}"))  # complete when the others see it: the last of them ends the job
    # All have written their files, so mpirun may continue and end the job.
    while len(list(Path(folder).glob("survivor-*"))) < keras_ddl.size() - 1:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGCONT)
    time.sleep(60)


can_hide_processes = can_make_namespaces("--pid", "--fork", "--mount-proc")
needs_namespaces = pytest.mark.skipif(not can_hide_processes, reason="needs the right to make namespaces (root)")
LONG_IN_NAMESPACES = [pytest.mark.long, needs_namespaces]


@pytest.mark.parametrize(
    ("np", "mode", "victim", "scene", "in_namespaces"),
    [
        (2, "p", 1, "idle", False),
        (4, "x:2x2", 3, "inside", False),
        pytest.param(2, "p", 0, "waiting", False, marks=pytest.mark.long),
        pytest.param(4, "x:1x4", 2, "joined", False, marks=pytest.mark.long),
        pytest.param(3, "p", 1, "waiting", True, marks=LONG_IN_NAMESPACES),
        pytest.param(3, "p", 1, "inside", True, marks=LONG_IN_NAMESPACES),
    ],
)
def test_survivors_on_one_host_get_an_error_soon(tmp_path, np, mode, victim, scene, in_namespaces):
    start = [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-np", str(np)]
    env = {"FOLDER": str(tmp_path), "KERAS_DDL_DEADLINE_SECONDS": "60"}
    if in_namespaces:
        start += ["sh", "-c", IN_NAMESPACES, "sh"]
        env["OMPI_MCA_btl"] = "self,tcp"  # Open MPI's own shared memory breaks if processes have equal pids
    arguments = (victim, scene, in_namespaces, str(tmp_path))
    outcome = run_ranks(loses_a_rank, np, args=arguments, mode=mode, mpirun=start, env=env)
    reports = {path.name: path.read_text() for path in tmp_path.glob("survivor-*")}
    assert len(reports) == np - 1, (reports, outcome.text())
    for text in reports.values():
        seconds, _, message = text.partition(" ")
        assert re.match(rf"RankLostError: .*rank {victim} on host \S+ \(process \d+\) died", message), reports
        assert float(seconds) < 30, reports  # a fraction of a second, unless the machine is busy


def dies_at_random(seed, everybody):
    import random
    import threading

    from harness.rank_program import rank

    def die(after):
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    after = random.Random(seed).uniform(0.2, 1.6)  # between the start and the middle of an all-reduce
    if everybody or rank() == seed % 3:
        threading.Thread(target=die, args=(after,), daemon=True).start()

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator

    keras_ddl.init()
    data = np.ones(4 << 20, np.float32)
    while True:
        communicator.all_reduce_array(data, out=data, name="data")


@pytest.mark.long
@pytest.mark.parametrize("everybody", [False, True])
def test_ranks_killed_at_random_leave_no_shared_memory(everybody):
    for seed in range(3):  # each rank once
        # run_ranks itself fails if shared memory or a process of the job is left behind.
        outcome = run_ranks(dies_at_random, 3, args=(seed, everybody))
        assert outcome.returncode not in (None, 0), outcome.text()


@needs_namespaces
def test_ranks_in_separate_pid_namespaces_share_memory_by_name():
    def work():
        import numpy as np

        import keras_ddl
        from keras_ddl import communicator

        keras_ddl.init()
        time.sleep(1)  # time for a process watch to be wrong, because pids mean nothing here
        total = communicator.all_reduce_array(np.full(100_000, keras_ddl.rank() + 1.0))
        return communicator.describe(), float(total.min()), float(total.max()), os.getpid()

    start = [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-np", "2", "unshare", "--pid", "--fork"]
    outcome = run_ranks(work, 2, mpirun=start, env={"OMPI_MCA_btl": "self,tcp"}).check()
    for rank in outcome.ranks:
        description, low, high, pid = rank.result
        assert (low, high, pid) == (3.0, 3.0, 1)
        assert "shm_open" in description, description
        assert "cross memory attach" not in description, description  # a pid means another process there
