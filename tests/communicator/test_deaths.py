"""Ranks that die, stop or become unreachable: an error on every survivor in time, and no shared memory left behind.

mpirun ends a job as soon as one of its processes dies. To see what the survivors themselves notice, these ranks are
started by mpirun but watched from outside it: the launcher is stopped before a rank is killed.
"""

import os
import re
import signal
import subprocess
import time

import pytest

from harness.rank_tests import find_mpirun, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def stop_the_launcher():
    """Suspends mpirun, the parent of every rank of this machine, so that it kills nobody."""
    os.kill(os.getppid(), signal.SIGSTOP)


def loses_a_rank(victim, scene, folder):
    """Every survivor returns how many seconds after the death it had the error, and the error."""
    from pathlib import Path

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    keras_ddl.init()
    rank = keras_ddl.rank()
    keras_ddl.barrier()
    data = np.ones(16 << 20, np.float32)
    dead = Path(folder, "dead")
    if rank == victim:
        stop_the_launcher()
        if scene == "inside":
            communicator.all_reduce_array(data, name="data")

            def die():
                time.sleep(0.02)
                dead.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

            import threading

            threading.Thread(target=die).start()
            while True:
                communicator.all_reduce_array(data, name="data", out=data)
        time.sleep(0.5)
        dead.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if scene == "inside":
            while True:
                communicator.all_reduce_array(data, name="data", out=data)
        if scene == "idle":
            while not dead.exists():
                time.sleep(0.01)
            time.sleep(0.2)
        if scene == "joined":
            keras_ddl.join()
        else:
            keras_ddl.barrier("never complete")
        message = "no error"
    except errors.RankLostError as error:
        message = str(error)
    seconds = time.monotonic() - float(dead.read_text())
    part = Path(folder, f"part-{rank}")
    part.write_text(f"{seconds:.3f} {message}")
    part.rename(Path(folder, f"survivor-{rank}"))  # whole when the others see it: the last of them ends the job
    # All have told: the launcher may go on, and ends the job.
    while len(list(Path(folder).glob("survivor-*"))) < keras_ddl.size() - 1:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGCONT)
    time.sleep(60)


@pytest.mark.parametrize(
    ("np", "mode", "victim", "scene"),
    [
        (2, "p", 1, "idle"),
        (4, "x:2x2", 3, "inside"),
        pytest.param(2, "p", 0, "waiting", marks=pytest.mark.long),
        pytest.param(4, "x:1x4", 2, "joined", marks=pytest.mark.long),
    ],
)
def test_survivors_of_one_host_have_an_error_soon(tmp_path, np, mode, victim, scene):
    outcome = run_ranks(loses_a_rank, np, args=(victim, scene, str(tmp_path)), mode=mode)
    told = {path.name: path.read_text() for path in tmp_path.glob("survivor-*")}
    assert len(told) == np - 1, (told, outcome.text())
    for text in told.values():
        seconds, _, message = text.partition(" ")
        assert re.search(rf"rank {victim} on host \S+ \(process \d+\) died", message), told
        assert float(seconds) < 30, told  # a fraction of a second, unless the machine is busy with something else


def dies_at_random(seed, everybody):
    import random
    import threading

    from harness.rank_program import rank

    def die(after):
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    after = random.Random(seed).uniform(0.2, 1.6)  # from before the ranks meet to the middle of an all-reduce
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
def test_nothing_is_left_in_shared_memory_by_ranks_killed_at_random(everybody):
    for seed in range(3):  # each rank once
        # run_ranks itself fails when shared memory or a process of the job stays behind.
        outcome = run_ranks(dies_at_random, 3, args=(seed, everybody))
        assert outcome.returncode not in (None, 0), outcome.text()


def test_ranks_that_cannot_see_one_anothers_processes_share_memory_by_name():
    def work():
        import numpy as np

        import keras_ddl
        from keras_ddl import communicator

        keras_ddl.init()
        time.sleep(1)  # time for a watch over processes to be wrong about numbers that mean nothing here
        total = communicator.all_reduce_array(np.full(100_000, keras_ddl.rank() + 1.0))
        return communicator.describe(), float(total.min()), float(total.max()), os.getpid()

    start = [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-np", "2", "unshare", "--pid", "--fork"]
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make process-id namespaces (root)")
    # Open MPI itself does not stand processes of one number on one host, unless it takes the network.
    outcome = run_ranks(work, 2, mpirun=start, env={"OMPI_MCA_btl": "self,tcp"}).check()
    for rank in outcome.ranks:
        description, low, high, pid = rank.result
        assert (low, high, pid) == (3.0, 3.0, 1)
        assert "shm_open" in description, description
        assert "cross memory attach" not in description, description  # a process id means another process there


# mpirun would end the job when it misses a rank: it is stopped while one dies. The rank is not the first process of its
# namespace, which no signal from inside can kill.
ELSEWHERE = """
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


def loses_a_rank_elsewhere(scene, folder):
    """The survivors return how many seconds after the death they had the error, and the error."""
    import threading
    from pathlib import Path

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    keras_ddl.init()
    rank = keras_ddl.rank()
    dead = Path(folder, "dead")
    data = np.ones(8 << 20, np.float32)
    keras_ddl.barrier()
    if rank == 1:
        Path(folder, "stop").touch()
        while not Path(folder, "stopped").exists():
            time.sleep(0.01)

        def die():
            dead.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(0.3, die).start()
        while True:
            if scene == "inside":
                communicator.all_reduce_array(data, out=data, name="data")
            else:
                time.sleep(0.1)
    try:
        while scene == "inside":
            communicator.all_reduce_array(data, out=data, name="data")
        keras_ddl.barrier("never complete")
        message = "no error"
    except errors.KerasDdlError as error:
        message = f"{type(error).__name__}: {error}"
    Path(folder, f"survivor-{rank}").write_text(f"{time.monotonic() - float(dead.read_text()):.3f} {message}")


@pytest.mark.long
@pytest.mark.parametrize("scene", ["waiting", "inside"])
def test_a_death_in_another_process_id_namespace_is_noticed(tmp_path, scene):
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make process-id namespaces (root)")
    start = [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-np", "3", "sh", "-c", ELSEWHERE, "sh"]
    env = {"OMPI_MCA_btl": "self,tcp", "FOLDER": str(tmp_path), "KERAS_DDL_DEADLINE_SECONDS": "60"}
    arguments = (scene, str(tmp_path))
    outcome = run_ranks(loses_a_rank_elsewhere, 3, args=arguments, mpirun=start, env=env)
    told = {path.name: path.read_text() for path in tmp_path.glob("survivor-*")}
    assert len(told) == 2, (told, outcome.text())
    for text in told.values():
        seconds, _, message = text.partition(" ")
        assert re.match(r"RankLostError: rank 1 on host \S+ \(process \d+\) died", message), told
        assert float(seconds) < 30, told
