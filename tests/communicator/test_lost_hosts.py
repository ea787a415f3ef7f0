"""Hosts that stop: within ten seconds, the ranks of the others get an error that names the host.

For keras_ddl, ranks with different host names (UTS namespaces) are on different hosts. It then does not share memory
between them or watch processes, but listens for heartbeats.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time

import pytest

from harness.emulated_hosts import can_make_namespaces
from harness.rank_tests import find_mpirun, run_ranks

needs_host_names = pytest.mark.skipif(not can_make_namespaces("--uts"), reason="needs the right to name hosts (root)")
pytestmark = [pytest.mark.parallel, pytest.mark.quiet, needs_host_names]


def on_hosts(hosts: int, np: int) -> list[str]:
    """Returns an mpirun whose ranks have host names: h0 for the first np / hosts of them, h1 for the next, ..."""
    name_the_host = f'hostname h$((OMPI_COMM_WORLD_RANK * {hosts} / {np})); exec "$@"'
    start = [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-np", str(np)]
    return [*start, "unshare", "--uts", "bash", "-c", name_the_host, "_"]


def loses_a_host(scene, folder):
    from pathlib import Path

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    keras_ddl.init()
    rank, size = keras_ddl.rank(), keras_ddl.size()
    assert keras_ddl.num_hosts() == 2
    data = np.zeros(16 << 20, np.float32)
    pids = keras_ddl.all_gather_object(os.getpid())
    stands_still = rank >= size // 2

    def stand_still():
        time.sleep(0.5)
        Path(folder, f"still-{rank}").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGSTOP)

    if stands_still:
        threading.Thread(target=stand_still).start()
    try:
        while scene == "inside":
            communicator.all_reduce_array(data, name="data", out=data)
        if stands_still:
            time.sleep(60)
        keras_ddl.barrier("never complete")
        message = "no error"
    except errors.RankLostError as error:
        message = str(error)
    if stands_still:  # mpirun continues stopped processes to end them
        time.sleep(60)
    seconds = time.monotonic() - min(float(path.read_text()) for path in Path(folder).glob("still-*"))
    Path(folder, f"survivor-{rank}").write_text(f"{seconds:.3f} {message}")
    while len(list(Path(folder).glob("survivor-*"))) < size // 2:
        time.sleep(0.01)
    for pid in pids:  # some may have ended: the other survivors and mpirun do the same
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("np", "scene", "lost_after"),
    [(2, "waiting", None), pytest.param(4, "inside", 4, marks=pytest.mark.long)],
)
def test_stopped_host_is_an_error_on_the_others(tmp_path, np, scene, lost_after):
    """`lost_after`: None for the default of 8 s, which promises an error within ten seconds on free cores."""
    env = {"KERAS_DDL_LOST_AFTER_SECONDS": lost_after and str(lost_after)}
    outcome = run_ranks(loses_a_host, np, args=(scene, str(tmp_path)), mpirun=on_hosts(2, np), env=env, timeout=120)
    reports = {path.name: path.read_text() for path in tmp_path.glob("survivor-*")}
    assert len(reports) == np // 2, (reports, outcome.text())
    ranks = ", ".join(str(rank) for rank in range(np // 2, np))
    for text in reports.values():
        seconds, _, message = text.partition(" ")
        found = re.search(rf"no sign of life from rank\(s\) {ranks} on host h1 for (\d+) s", message)
        assert found and int(found[1]) >= (lost_after or 8), reports
        assert float(seconds) < 30, reports


def slow_ranks():
    import keras_ddl

    keras_ddl.init()
    rank = keras_ddl.rank()
    if rank == 2:  # the first of its host, which usually sends its heartbeats
        subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        time.sleep(8)
    keras_ddl.barrier("late")
    return "done"


@pytest.mark.long
def test_host_with_one_stopped_process_is_not_lost():
    env = {"KERAS_DDL_WARN_AFTER_SECONDS": "3", "KERAS_DDL_LOST_AFTER_SECONDS": "4"}
    outcome = run_ranks(slow_ranks, 4, mpirun=on_hosts(2, 4), env=env).check()
    assert [rank.result for rank in outcome.ranks] == ["done"] * 4
    warning = next(line for line in outcome.ranks[0].stderr.splitlines() if "keras_ddl: barrier" in line)
    assert "for rank(s) 0, 1, 2; rank(s) 3" in warning or "for rank(s) 1, 2; rank(s) 0, 3" in warning, warning
    assert re.search(r"Rank 1 on host h0 \(process \d+\) is at .*test_lost_hosts\.py:\d+ in slow_ranks\.", warning)
    assert re.search(r"Rank 2 on host h1 \(process \d+\) shows no sign of life", warning)
