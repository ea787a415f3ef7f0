"""Ranks that pass on what others announce, and die or stop: the others have an error in time that names them.

The ranks have host names of their own, as in test_lost_hosts.py; with a fan-in this small some of the four are relays.
"""

import contextlib
import os
import re
import signal
import time

import pytest

from communicator.test_lost_hosts import needs_host_names, on_hosts
from harness.rank_tests import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet, needs_host_names]


def loses_a_relay(relay, how, folder):
    """Every other rank writes how many seconds after the loss it had an error, and the error."""
    from pathlib import Path

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    keras_ddl.init()
    rank, size = keras_ddl.rank(), keras_ddl.size()
    pids = keras_ddl.all_gather_object(os.getpid())
    for _ in range(20):  # by number after the first time
        communicator.all_reduce_array(np.ones(3, np.float32), name="before")
    lost = Path(folder, "lost")
    if rank == relay:
        os.kill(os.getppid(), signal.SIGSTOP)  # mpirun would end the job
        time.sleep(0.5)
        lost.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), how)
        time.sleep(60)
    try:
        communicator.all_reduce_array(np.ones(3, np.float32), name="before")
        message = "no error"
    except errors.KerasDdlError as error:
        message = f"{type(error).__name__}: {error}"
    part = Path(folder, f"part-{rank}")
    part.write_text(f"{time.monotonic() - float(lost.read_text()):.3f} {message}")
    part.rename(Path(folder, f"survivor-{rank}"))
    while len(list(Path(folder).glob("survivor-*"))) < size - 1:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGCONT)
    for pid in pids:  # some may be gone already: the others do the same
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


DIED = {"any": r"RankLostError: rank 2 on host h1 \(process \d+\) died"}
STOPPED = {
    # The process beside it sees that it is stopped; for those of the other host its host lives.
    "any": r"DeadlineError: .* for rank\(s\) 2; .* Rank 2 on host h1 \(process \d+\) shows no sign of life",
    "survivor-3": r"DeadlineError: .* no answer .* rank 2 .* passes messages on: rank 2 is stopped \(SIGSTOP",
}
SILENT = {"any": r"RankLostError: no sign of life from rank\(s\) 1 on host h1 for \d+ s"}


@pytest.mark.parametrize(
    ("hosts", "relay", "how", "words", "seconds"),
    [
        pytest.param(2, 2, signal.SIGKILL, DIED, (0, 5), id="killed"),
        pytest.param(2, 2, signal.SIGSTOP, STOPPED, (6, 25), id="stopped", marks=pytest.mark.long),
        pytest.param(4, 1, signal.SIGKILL, SILENT, (2, 10), id="killed alone", marks=pytest.mark.long),
        pytest.param(4, 1, signal.SIGSTOP, SILENT, (2, 10), id="stopped alone", marks=pytest.mark.long),
    ],
)
def test_lost_relay_is_an_error_on_all_others(tmp_path, hosts, relay, how, words, seconds):
    env = {
        "KERAS_DDL_CONTROL_FAN_IN": "1",
        "KERAS_DDL_LOST_AFTER_SECONDS": "4",
        "KERAS_DDL_DEADLINE_SECONDS": "8",  # behind a relay a rank waits for 8 * 1.25 + 5
    }
    arguments = (relay, int(how), str(tmp_path))
    # run_ranks itself fails when shared memory or a process of the job stays behind.
    outcome = run_ranks(loses_a_relay, 4, args=arguments, mpirun=on_hosts(hosts, 4), env=env, timeout=90)
    told = {path.name: path.read_text() for path in tmp_path.glob("survivor-*")}
    assert len(told) == 3, (told, outcome.text())
    for name, text in told.items():
        after, _, message = text.partition(" ")
        assert re.match(words.get(name, words["any"]), message), told
        assert seconds[0] <= float(after) < seconds[1], told
