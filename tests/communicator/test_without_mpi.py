"""Ranks of one host, started by the launcher without MPI: survivors, and ranks that never meet."""

import re

import pytest

from harness.rank_tests import run_ranks, without_mpi

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def test_remaining_ranks_continue_without_the_others():
    def work():
        import os
        import time

        import numpy as np

        import keras_ddl
        from keras_ddl import communicator
        from keras_ddl.errors import RankLostError

        keras_ddl.init()
        world = communicator.communicator_of(None)
        rank = keras_ddl.rank()
        left = world.of_ranks([0, 2], name="two") if rank != 1 else None
        if rank == 1:
            os._exit(0)  # with status 0, because otherwise the launcher would end the others
        begun = time.monotonic()
        try:
            communicator.barrier()
            raise AssertionError("a barrier without rank 1")
        except RankLostError as error:
            assert "rank 1" in str(error)
        seconds = time.monotonic() - begun
        # One communicator from before, and one made now.
        after = world.of_ranks([0, 2], name="after")
        sums = [float(each.all_reduce_array(np.ones(3), "sum")[0]) for each in (left, after)]
        return seconds, sums

    outcome = run_ranks(work, 3, mpirun=without_mpi(3))
    for rank in (0, 2):
        seconds, sums = outcome.ranks[rank].result or pytest.fail(outcome.text())
        assert seconds < 50 and sums == [2.0, 2.0]


def test_missing_rank_is_named_and_awaited_until_the_deadline():
    def work():
        import os
        import time
        from pathlib import Path

        import keras_ddl
        from keras_ddl.errors import DeadlineError

        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            while not Path("given-up").exists():
                time.sleep(0.01)
            return None
        try:
            keras_ddl.init()
        except DeadlineError as error:
            return str(error)
        finally:
            Path("given-up").touch()
        raise AssertionError("met nobody")

    env = {"KERAS_DDL_WARN_AFTER_SECONDS": "0.5", "KERAS_DDL_DEADLINE_SECONDS": "2"}
    outcome = run_ranks(work, 2, mpirun=without_mpi(2), env=env).check()
    waited = r"rank 0 has waited \d+ s for rank\(s\) \[1\]"
    assert re.match(waited, outcome.ranks[0].result), outcome.text()
    assert re.search(f"keras_ddl: {waited}", outcome.ranks[0].stderr), outcome.text()


def test_program_that_uses_mpi_itself_is_refused():
    def work():
        import os

        import keras_ddl
        from keras_ddl.errors import ConfigError

        del os.environ["MPI4PY_LIBMPI"]  # so that MPI can start alone
        from mpi4py import MPI

        assert MPI.COMM_WORLD.size == 1
        try:
            keras_ddl.init()
        except ConfigError as error:
            return str(error)
        raise AssertionError("not refused")

    outcome = run_ranks(work, 2, mpirun=without_mpi(2)).check()
    for rank in outcome.ranks:
        assert "Start the job with `keras-ddl run --mpirun mpirun ...`" in rank.result


def test_ranks_that_never_meet_stop_trying(monkeypatch):
    from types import SimpleNamespace

    from keras_ddl import communicator
    from keras_ddl.communicator.transports.membership import Membership
    from keras_ddl.errors import RankLostError

    asked = []

    def next_membership(launcher, epoch, admits=None):
        asked.append(epoch)
        return Membership(epoch + 1, (0, 1, 2) if epoch == 0 else (0, 1))

    def fails(*_):
        raise RankLostError("rank 1 died, or cannot be reached")

    monkeypatch.setattr(communicator.world, "topology", lambda: SimpleNamespace(mode="p", rank=0))
    monkeypatch.setattr(communicator.world, "find_launcher", lambda: SimpleNamespace(rank=0))
    monkeypatch.setattr(communicator.meeting, "next_membership", next_membership)
    monkeypatch.setattr(communicator.meeting, "without_mpi", fails)
    monkeypatch.setattr(communicator.world._state, "membership", None)
    with pytest.raises(RankLostError, match="cannot be reached"):
        communicator.regroup()
    assert asked == [0, 1, 2, 3]  # once with three members, three times with two
