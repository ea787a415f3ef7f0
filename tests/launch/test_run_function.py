"""keras_ddl.run: functions on ranks, their results and exceptions."""

import io
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import cloudpickle
import pytest

import keras_ddl
from keras_ddl.errors import ConfigError, DeadlineError, LaunchError, RankError
from launch.launching import Started, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


class OwnError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def number() -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as in a notebook: ranks cannot import this module


def test_run_function_returns_results_by_rank_and_streams_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    closed_over, blob, shown = {"offset": 100}, os.urandom(5_000_000), tmp_path / "shown"

    class Stream(io.StringIO):
        def write(self, text):
            shown.touch()
            return super().write(text)

    out, err = Stream(), io.StringIO()

    def work(base, data, *, scale):
        rank = number()
        print("hello from", rank)  # not flushed: Python would buffer it until the end
        while not shown.exists():
            time.sleep(0.01)
        print("error of", rank, file=sys.stderr)
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        return {"value": (base + rank) * scale + closed_over["offset"], "data": data}

    with redirect_stdout(out), redirect_stderr(err), ThreadPoolExecutor(1) as thread:
        results = thread.submit(keras_ddl.run, work, np=3, args=(10, blob), kwargs={"scale": 2}).result()
    assert [result["value"] for result in results] == [120, 122, 124]
    assert all(result["data"] == blob for result in results)
    assert sorted(out.getvalue().splitlines()) == ["[1] hello from 1", "[2] hello from 2", "hello from 0"]
    assert sorted(err.getvalue().splitlines()) == ["[1] error of 1", "[2] error of 2", "error of 0"]


def test_run_function_raises_the_ranks_exception():
    def work():
        if number() == 1:
            raise OwnError("this", "that")
        time.sleep(600)

    # OwnError cannot be rebuilt from its arguments, so only its text and cause are known.
    with pytest.raises(RankError, match="OwnError: this and that") as caught:
        keras_ddl.run(work, np=2)
    assert "in work" in str(caught.value) and "rank 1 on host" in str(caught.value)

    def key():
        {}["missing"]

    with pytest.raises(KeyError, match="missing") as caught:
        keras_ddl.run(key, np=1)
    cause = caught.value.__cause__
    assert isinstance(cause, RankError) and "KeyError: 'missing'" in str(cause)
    assert "launch/worker.py" not in str(cause)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(0)", "must return on every rank"),
        pytest.param("raise SystemExit(3)", "SystemExit: 3", marks=pytest.mark.long),
        pytest.param("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL", marks=pytest.mark.long),
    ],
)
def test_run_function_that_does_not_return_raises_rank_error(code: str, said: str):
    with pytest.raises(RankError, match=said):
        keras_ddl.run(lambda: exec(code), np=1)


@pytest.mark.long
def test_run_function_that_takes_too_long_raises_deadline_error():
    with pytest.raises(DeadlineError, match="timeout=2 seconds"):
        keras_ddl.run(lambda: time.sleep(600), np=2, timeout=2)


@pytest.mark.long
def test_run_function_can_be_called_again_after_a_failure():
    def work(base):
        attempt = int(os.environ["KERAS_DDL_RESTART"])
        if number() == 1 and attempt == 0:
            os.kill(os.getpid(), 9)
        return base + attempt

    with redirect_stderr(io.StringIO()) as err:
        assert keras_ddl.run(work, np=2, args=(5,), restarts=1) == [6, 6]
    assert "restart 1 of 1, with 2 ranks (rank 1: killed by SIGKILL)" in err.getvalue()


def test_run_function_that_cannot_be_pickled_is_a_clear_error():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="must be picklable, to be sent to the ranks. Received: .*closure.*lock"):
        keras_ddl.run(closure(lock), np=2)
    with pytest.raises(ConfigError, match="must be picklable"):
        keras_ddl.run(print, np=2, args=((x for x in ()),))
    with pytest.raises(ConfigError, match="fn must be a function. Received: fn=3"):
        keras_ddl.run(3)
    with pytest.raises(ConfigError, match="np must be a whole number of ranks, 1 or more. Received: np=0"):
        keras_ddl.run(number, np=0)


def closure(lock):
    def closure():
        return lock

    return closure


@pytest.mark.long
def test_run_function_must_return_picklable_values_and_start_no_ranks():
    with pytest.raises(LaunchError, match="The result of fn must be picklable. Received: Lock|lock on rank 0"):
        keras_ddl.run(lambda: __import__("threading").Lock(), np=1)
    with pytest.raises(LaunchError, match="must not be called by a rank of a job"):
        keras_ddl.run(lambda: keras_ddl.run(number, np=2), np=1)


def test_run_function_finds_the_callers_modules_and_can_be_interrupted(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "my_own_module.py").write_text("def f(x): return x + 1\n")
    source = """
sys.path.insert(0, "lib")
import keras_ddl, my_own_module
class Local:
    def __init__(self, x): self.x = x
def sleep():
    Path("up-" + os.environ["OMPI_COMM_WORLD_RANK"]).touch()
    time.sleep(600)
print([each.x for each in keras_ddl.run(lambda: Local(my_own_module.f(1)), np=2)])
try: keras_ddl.run(sleep, np=2)
except KeyboardInterrupt: print("interrupted")
"""
    started = Started([write_program(tmp_path, source)], tmp_path, main=())
    started.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    started.process.send_signal(signal.SIGINT)
    assert started.finish().out == "[2, 2]\ninterrupted\n"
