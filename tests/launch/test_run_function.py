"""keras_ddl.run: functions on ranks, their results and their exceptions."""

import io
import os
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import keras_ddl
from keras_ddl.errors import ConfigError, DeadlineError, LaunchError, RankError
from launch.launching import LIMIT_SECONDS, environment, eventually, processes

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


class OwnError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def number() -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def by_value(function):
    """As a function of a notebook: this module cannot be imported by the ranks."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return function


by_value(None)


def test_run_function_returns_results_by_rank_and_shows_output():
    closed_over = {"offset": 100}
    out, err = io.StringIO(), io.StringIO()

    def work(base, *, scale):
        rank = number()
        print("hello from", rank)
        print("error of", rank, file=sys.stderr)
        return {"value": (base + rank) * scale + closed_over["offset"], "data": b"x" * 3_000_000}

    with redirect_stdout(out), redirect_stderr(err):
        results = keras_ddl.run(work, np=3, args=(10,), kwargs={"scale": 2}, env={"EXTRA": "1"})
    assert [result["value"] for result in results] == [120, 122, 124]
    assert all(len(result["data"]) == 3_000_000 for result in results)
    assert sorted(out.getvalue().splitlines()) == ["[1] hello from 1", "[2] hello from 2", "hello from 0"]
    assert "[2] error of 2" in err.getvalue()


def test_run_function_shows_no_notes_of_tensorflow_in_a_cell():
    def work():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        os.write(2, b"own line\n")

    err = io.StringIO()
    with redirect_stderr(err):
        keras_ddl.run(work, np=1)
    assert err.getvalue() == "own line\n"


def test_run_function_output_is_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    shown = tmp_path / "shown"

    class Stream(io.StringIO):
        def write(self, text):
            shown.touch()
            return super().write(text)

    def work():
        print("first")  # not flushed: to a pipe, Python alone would keep it until the end
        while not shown.exists():
            time.sleep(0.01)
        print("second")

    with redirect_stdout(Stream()) as stream:
        keras_ddl.run(work, np=1, timeout=LIMIT_SECONDS)
    assert stream.getvalue() == "first\nsecond\n"


def test_run_function_takes_large_arguments():
    blob = os.urandom(20_000_000)
    assert keras_ddl.run(lambda data: (len(data), data[-1]), np=2, args=(blob,)) == [(len(blob), blob[-1])] * 2


def test_run_function_raises_the_exception_of_the_rank():
    def work():
        if number() == 1:
            raise OwnError("this", "that")
        time.sleep(600)

    began = time.monotonic()
    # OwnError cannot be rebuilt from its arguments: only what was raised and why can be told.
    with pytest.raises(RankError, match="OwnError: this and that") as caught:
        keras_ddl.run(work, np=2)
    assert "in work" in str(caught.value) and "rank 1 on host" in str(caught.value)
    assert time.monotonic() - began < LIMIT_SECONDS

    def key():
        {}["missing"]

    with pytest.raises(KeyError, match="missing") as caught:
        keras_ddl.run(key, np=2)
    cause = caught.value.__cause__
    assert isinstance(cause, RankError) and "KeyError: 'missing'" in str(cause)
    assert "launch/worker.py" not in str(cause)


def test_run_function_ends_with_the_exception_of_its_generator_of_data():
    def work():
        import tensorflow as tf

        def rows():
            yield 1
            raise KeyError("my own mistake")

        list(tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.int32)))

    with pytest.raises(RankError) as caught:
        keras_ddl.run(work, np=1)
    assert str(caught.value).splitlines()[-1].endswith("KeyError: 'my own mistake'"), caught.value


def test_run_function_that_exits_or_is_killed_raises_rank_error():
    def leave():
        sys.exit(3 if number() == 0 else 0)

    with pytest.raises(RankError, match="SystemExit: 3"):
        keras_ddl.run(leave, np=2)

    def leave_quietly():
        sys.exit(0)

    with pytest.raises(RankError, match="must return on every rank"):
        keras_ddl.run(leave_quietly, np=1)

    def be_killed():
        os.kill(os.getpid(), 9)

    with pytest.raises(RankError, match="killed by SIGKILL"):
        keras_ddl.run(be_killed, np=2)


def test_run_function_is_called_again_after_a_failure():
    def work(base):
        attempt = int(os.environ["KERAS_DDL_RESTART"])
        if number() == 1 and attempt == 0:
            os.kill(os.getpid(), 9)
        return base + attempt

    err = io.StringIO()
    with redirect_stderr(err):
        assert keras_ddl.run(work, np=2, args=(5,), restarts=1) == [6, 6]
    assert "restart 1 of 1, with 2 ranks (rank 1: killed by SIGKILL)" in err.getvalue()
    with pytest.raises(ConfigError, match="restarts must be .*Received: restarts=-1"):
        keras_ddl.run(work, np=1, args=(5,), restarts=-1)


def test_run_function_that_cannot_travel_is_a_clear_error():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="must be picklable, to be sent to the ranks. Received: .*closure.*lock"):
        keras_ddl.run(closure(lock), np=2)
    with pytest.raises(ConfigError, match="must be picklable"):
        keras_ddl.run(print, np=2, args=((x for x in ()),))
    with pytest.raises(ConfigError, match="fn must be a function. Received: fn=3"):
        keras_ddl.run(3)
    with pytest.raises(LaunchError, match="What fn returns must be picklable. Received: Lock|lock on rank 0"):
        keras_ddl.run(lambda: __import__("threading").Lock(), np=1)


def closure(lock):
    def closure():
        return lock

    return closure


def test_run_function_checks_its_settings():
    with pytest.raises(ConfigError, match="np must be a whole number of ranks, 1 or more. Received: np=0"):
        keras_ddl.run(number, np=0)
    with pytest.raises(ConfigError, match=r"must equal the number of ranks \(2\)"):
        keras_ddl.run(number, np=2, mode="x:3x1")
    with pytest.raises(LaunchError, match="must not be called by a rank of a job"):
        keras_ddl.run(lambda: keras_ddl.run(number, np=2), np=1)


def test_run_function_timeout():
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="timeout=2 seconds"):
        keras_ddl.run(lambda: time.sleep(600), np=2, timeout=2)
    assert time.monotonic() - began < LIMIT_SECONDS


def test_run_function_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(keras_ddl.run(number, np=2)))
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert results == [[0, 1]]


def test_run_function_finds_modules_where_the_caller_does(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "my_own_module.py").write_text("def f(x): return x + 1\n")
    program = "import sys; sys.path.insert(0, 'lib')\nimport keras_ddl, my_own_module\n"
    program += "class Local:\n    def __init__(self, x): self.x = x\n"
    program += "print([r.x for r in keras_ddl.run(lambda: Local(my_own_module.f(1)), np=2)])\n"
    (tmp_path / "caller.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "caller.py"],
        cwd=tmp_path,
        env=environment("-", tmp_path, None),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[2, 2]\n", done


def test_run_function_is_interrupted(tmp_path: Path):
    (tmp_path / "tmp").mkdir()
    program = "import keras_ddl, time, pathlib, os\n"
    program += "def work():\n    pathlib.Path('up-' + os.environ['OMPI_COMM_WORLD_RANK']).touch(); time.sleep(600)\n"
    program += "try: keras_ddl.run(work, np=2)\nexcept KeyboardInterrupt: print('interrupted')\n"
    (tmp_path / "caller.py").write_text(program)
    mark = "interrupted-" + os.urandom(8).hex()
    process = subprocess.Popen(
        [sys.executable, "caller.py"],
        cwd=tmp_path,
        env=environment(mark, tmp_path / "tmp", None),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert eventually(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    process.send_signal(2)
    assert process.communicate(timeout=LIMIT_SECONDS)[0] == "interrupted\n"
    assert not processes(mark)
    assert list((tmp_path / "tmp").iterdir()) == []
