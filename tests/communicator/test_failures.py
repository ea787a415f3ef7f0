"""Ranks that fail, leave, die or disagree: the job ends within seconds with an error status, and says why."""

import ctypes
import os
import signal
import sys
import threading
import time

import pytest

from harness.rank_tests import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]
NO_DEADLINE = {"KERAS_DDL_DEADLINE_SECONDS": "600"}  # longer than a test, so an earlier end has another cause
LONG = pytest.mark.long


@pytest.mark.parametrize(("where", "ranks"), [("main thread", 1), ("main thread", 2), ("another thread", 2)])
def test_uncaught_exception_ends_the_job_with_its_traceback(where, ranks):
    def work(where):
        import keras_ddl

        keras_ddl.init()

        def fail():
            raise ValueError("bad row 17")

        if keras_ddl.rank() == keras_ddl.size() - 1:
            if where == "main thread":
                fail()
            threading.Thread(target=fail).start()
            time.sleep(600)
        keras_ddl.barrier()  # never completes

    outcome = run_ranks(work, ranks, args=(where,), env=NO_DEADLINE)
    last = ranks - 1
    assert outcome.returncode not in (None, 0), outcome.text()
    assert outcome.ranks[last].stderr.count("ValueError: bad row 17") == 1
    assert 'raise ValueError("bad row 17")' in outcome.ranks[last].stderr


# A leaver with status 0 waits for the others when its process ends, so they must end the job.
@pytest.mark.parametrize(("mode", "leaver", "status"), [("p", 1, 3), pytest.param("x:1x2", 1, 0, marks=LONG)])
def test_rank_that_exits_early_is_named_on_the_others(mode, leaver, status):
    def work(leaver, status):
        import keras_ddl
        from keras_ddl import errors

        keras_ddl.init()
        keras_ddl.barrier()
        if keras_ddl.rank() == leaver:
            ctypes.CDLL(None).printf(b"not flushed")  # in libc's buffer, lost unless the process exits normally
            sys.exit(status)
        try:
            keras_ddl.barrier("never")
        except errors.RankLostError as error:
            assert f"rank {leaver} has left" in str(error) and "barrier 'barrier/never'" in str(error), error
            assert error.has_left
            print("as expected at", time.monotonic())
            raise

    outcome = run_ranks(work, 2, args=(leaver, status), mode=mode)
    ended = time.monotonic()
    assert "as expected" in outcome.ranks[1 - leaver].stdout, outcome.text()
    assert "not flushed" in outcome.ranks[leaver].stdout, outcome.text()
    assert outcome.returncode == (status or 1), outcome.text()
    failed_at = float(outcome.ranks[1 - leaver].stdout.split()[-1])
    assert ended - failed_at < 9, outcome.text()  # no rank waits ten seconds for a status that does not come


def interrupted(signum, expected):
    """Sends rank 0 a signal in an all-reduce whose other rank has stopped, until rank 0 has left the call."""
    from pathlib import Path

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    data = np.ones(8 << 20, np.float32)
    communicator.all_reduce_array(data, out=data, op="max", name="data")
    rank, other = keras_ddl.rank(), keras_ddl.all_gather_object(os.getpid())[1]

    def stop_the_other_one():
        time.sleep(0.5)
        os.kill(other, signal.SIGSTOP)
        while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        time.sleep(0.5)  # lets rank 0 enter one
        signal.raise_signal(signum)

    if rank == 1:
        expected = pytest.raises(errors.RankLostError)
    else:
        threading.Thread(target=stop_the_other_one).start()
    try:
        with expected:
            while True:  # spends nearly all its time inside one
                communicator.all_reduce_array(data, out=data, op="max", name="data")
    finally:
        if rank == 0:
            os.kill(other, signal.SIGCONT)


@pytest.mark.parametrize("mode", ["p", pytest.param("x:1x2", marks=LONG)])
def test_ctrl_c_ends_a_collective_with_a_stopped_rank(mode):
    def work():
        import keras_ddl

        signal.signal(signal.SIGINT, signal.default_int_handler)
        keras_ddl.init()
        interrupted(signal.SIGINT, pytest.raises(KeyboardInterrupt))

    run_ranks(work, 2, mode=mode, env=NO_DEADLINE).check()


@pytest.mark.parametrize("what", [pytest.param("barrier", marks=LONG), "shutdown"])
def test_signal_handler_inside_a_collective_does_not_hang(what):
    def work(what):
        import keras_ddl
        from keras_ddl import errors

        keras_ddl.init()
        error = errors.CollectiveError if what == "barrier" else errors.NotInitializedError
        signal.signal(signal.SIGTERM, lambda *_: getattr(keras_ddl, what)())
        interrupted(signal.SIGTERM, pytest.raises(error, match="signal handler"))
        keras_ddl.shutdown()

    run_ranks(work, 2, args=(what,), env=NO_DEADLINE).check()


@pytest.mark.parametrize("what", [pytest.param("barrier", marks=LONG), "shutdown"])
def test_signal_handler_inside_a_collective_with_absent_ranks_does_not_hang(what, tmp_path):
    def work(what, given_up):
        import keras_ddl
        from keras_ddl import errors

        keras_ddl.init()
        error = errors.CollectiveError if what == "barrier" else errors.NotInitializedError
        if keras_ddl.rank() == 0:
            signal.signal(signal.SIGTERM, lambda *_: getattr(keras_ddl, what)())
            threading.Timer(1, signal.raise_signal, [signal.SIGTERM]).start()
            with pytest.raises(error, match="signal handler"):
                keras_ddl.barrier("meet")
            given_up.touch()
        else:
            while not given_up.exists():
                time.sleep(0.01)
            with pytest.raises(errors.RankLostError):  # rank 0 has given up and left
                keras_ddl.barrier("meet")

    run_ranks(work, 2, args=(what, tmp_path / "given-up"), env=NO_DEADLINE).check()


def test_invalid_and_different_settings_are_errors_on_every_rank():
    def work():
        import keras_ddl
        from keras_ddl import communicator, errors

        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        os.environ["KERAS_DDL_MODES"] = "p"
        with pytest.raises(errors.ConfigError, match="nearest is KERAS_DDL_MODE"):
            keras_ddl.init()
        assert "mpi4py" not in sys.modules  # so the process can end without waiting for others
        del os.environ["KERAS_DDL_MODES"]
        with pytest.raises(errors.RankMismatchError, match=r"mode must be equal.*'p' on rank\(s\) \[0\]; 'x:1x2' on"):
            keras_ddl.init("x:1x2" if rank else "p")
        with pytest.raises(errors.ConfigError, match=r"number of ranks \(2\)"):
            keras_ddl.init("x:3x1")
        os.environ["KERAS_DDL_DEADLINE_SECONDS"] = str(10 + rank)
        with pytest.raises(errors.RankMismatchError, match=r"KERAS_DDL_DEADLINE_SECONDS must be equal.*10.0 on"):
            keras_ddl.init()
        os.environ["KERAS_DDL_DEADLINE_SECONDS"] = "10"
        os.environ["KERAS_DDL_CMA"] = str(rank)
        with pytest.raises(errors.RankMismatchError, match="KERAS_DDL_CMA must be equal"):
            keras_ddl.init()
        os.environ["KERAS_DDL_CMA"] = "0"
        keras_ddl.init()
        assert "cross memory attach" not in communicator.describe()
        return keras_ddl.all_gather_object(rank)

    outcome = run_ranks(work, 2).check()
    assert [rank.result for rank in outcome.ranks] == [[0, 1], [0, 1]]


def test_init_uses_mpi_started_by_the_program():
    def work(level):
        import mpi4py

        mpi4py.rc.thread_level = level
        from mpi4py import MPI

        import keras_ddl
        from keras_ddl import errors

        if level == "multiple":
            keras_ddl.init()
            return MPI.COMM_WORLD.allreduce(keras_ddl.rank()) + keras_ddl.size()
        with pytest.raises(errors.DependencyError, match="MPI_THREAD_MULTIPLE"):
            keras_ddl.init()
        return 3

    for level in ("multiple", "serialized"):
        outcome = run_ranks(work, 2, args=(level,)).check()
        assert [rank.result for rank in outcome.ranks] == [3, 3]


def test_launcher_of_another_mpi_is_an_error_that_names_the_remedy():
    def work():
        import keras_ddl
        from keras_ddl import errors

        with pytest.raises(
            errors.DependencyError, match="MPICH or Intel MPI started 2 .*rank 0.* sees 1.*keras-ddl run"
        ):
            keras_ddl.init()
        return "done"

    outcome = run_ranks(work, 1, env={"PMI_RANK": "0", "PMI_SIZE": "2"}).check()
    assert outcome.ranks[0].result == "done"


def test_lone_process_in_an_allocation_gets_a_warning():
    def work():
        import warnings

        import keras_ddl

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            keras_ddl.init()
        return [str(warning.message) for warning in caught], keras_ddl.size(), "mpi4py" in sys.modules

    outcome = run_ranks(work, 1, env={"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}).check()
    messages, size, has_mpi = outcome.ranks[0].result
    assert "rank 0 of size 1" in messages[0]
    assert "allocation of 8 tasks" in messages[0]
    assert (size, has_mpi) == (1, False)
