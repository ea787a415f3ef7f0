"""keras-ddl run when a rank fails: everything ends soon, the first failure is explained last, nothing is left."""

import os
import re
import signal
from pathlib import Path

import pytest

from launch.launching import STARTERS, Started, run, starter, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def test_run_exception_in_one_rank_ends_the_hanging_other(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
if RANK == 1:
    print("before the error", flush=True)
    raise ValueError("no such thing: 42")
time.sleep(600)
""",
    )
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 1, ended
    assert ended.out == "[1] before the error\n"
    lines = ended.err.splitlines()
    assert lines[-1] == "ValueError: no such thing: 42", ended
    header = next(line for line in lines if "failed first" in line)
    assert "rank 1 on host " in header and header.endswith("(exit status 1):")
    assert ended.err.count("Traceback") == 1 and ended.err.count("no such thing") == 2, ended  # and the line of code


def test_run_exit_status_is_that_of_the_failed_rank(tmp_path: Path):
    program = write_program(tmp_path, "if RANK == 0: time.sleep(600)\nsys.exit(3)")
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 3, ended
    assert "rank 1" in ended.err and "exit status 3" in ended.err


def test_run_exit_status_is_that_of_the_rank_that_left_the_others_waiting(tmp_path: Path):
    # Not that of rank 0, which hears that rank 1 has left; and rank 1 must not wait for it in MPI_Finalize.
    program = write_program(
        tmp_path,
        """
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
if RANK == 1: raise SystemExit(3)
keras_ddl.barrier()
""",
    )
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 3, ended
    assert "rank 1 on host" in ended.err and "ended with exit status 3" in ended.err
    assert "RankLostError" not in ended.err, ended  # rank 0 can only guess


@pytest.mark.parametrize("end", ["os._exit(0)", "print('bye', flush=True); os._exit(0)"])
def test_run_rank_that_ends_with_status_0_in_mid_job_is_named(end: str, tmp_path: Path):
    program = write_program(
        tmp_path,
        f"""
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
if RANK == 1: {end}
keras_ddl.barrier()
""",
    )
    ended = run(["run", "-np", "3", "python", program], tmp_path)
    assert ended.status == 1, ended
    last = ended.err.splitlines()[-1]
    how = "ended with status 0 in the middle of the job (sys.exit or os._exit?)"
    assert "rank 1 on host" in last and last.endswith(how), ended
    assert "RankLostError" not in ended.err and "Traceback" not in ended.err, ended


def test_run_own_words_of_a_rank_that_is_slow_to_end_come_last(tmp_path: Path):
    # Longer than the others' tracebacks are held back for without reason.
    program = write_program(
        tmp_path,
        """
import atexit
atexit.register(lambda: RANK == 1 and time.sleep(5))
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
if RANK == 1:
    print("no licence left", file=sys.stderr)
    sys.exit(3)
keras_ddl.barrier()
""",
    )
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 3, ended
    assert ended.err.splitlines()[-1] == "no licence left" and "Traceback" not in ended.err, ended


def test_run_exception_in_a_generator_of_data_comes_last(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
import keras_ddl
import tensorflow as tf

def rows():
    yield 1
    raise KeyError("my own mistake")

keras_ddl.init()
list(tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.int32)))
""",
    )
    ended = run(["run", "-np", "1", "python", program], tmp_path)
    assert ended.status == 1, ended
    lines = ended.err.splitlines()
    assert lines[-1] == "KeyError: 'my own mistake'", ended
    assert any(" in rows" in line for line in lines[-4:-1]), ended
    assert "tensorflow" not in "".join(lines[-8:]) and ended.err.count("Traceback") == 1, ended


MISTAKES = """
import keras, numpy as np
import keras_ddl

class Own(keras.Model):
    def train_step(self, data):
        return undefined(data)

class Break(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if KIND == "callback" and keras_ddl.rank() == 1:
            raise ValueError("my callback is wrong")

KIND = sys.argv[1]
strategy = keras_ddl.Strategy()
with strategy.scope():
    inputs = keras.Input((4,))
    model = (Own if KIND == "name" else keras.Model)(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
x = np.ones((8, 5 if KIND == "shape" else 4))
if KIND == "label":
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
model.fit(x, np.full(8, 7) if KIND == "label" else x[:, :1], batch_size=4, callbacks=[Break()], verbose=0)
"""


@pytest.mark.parametrize(
    ("kind", "who", "last", "most"),
    [
        ("shape", "all 2 ranks failed alike", "ValueError: Input 0 ", 5),
        ("callback", "rank 1 on host ", "ValueError: my callback is wrong", 7),
        pytest.param("name", "all 2 ranks failed alike", "NameError: name 'undefined'", 7, marks=pytest.mark.long),
        pytest.param("label", "", " [[{{node ", 12, marks=pytest.mark.long),
    ],
)
def test_run_shows_of_a_mistake_the_frames_of_the_program_and_one_message(
    kind: str, who: str, last: str, most: int, tmp_path: Path
):
    program = write_program(tmp_path, MISTAKES)
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = run(["run", "-np", "2", "python", program, kind], tmp_path, env=env)
    lines = [line for line in ended.err.splitlines() if not re.match(r"\s*\^+$|\[1\]|WARNING: All log|[IWE]0000", line)]
    assert ended.status == 1 and lines[0].startswith(f"keras-ddl: {who}"), ended
    assert "KERAS_DDL_ALL_FRAMES=1 shows all frames" in lines[0] and len(lines) <= most, ended
    assert lines[-1].strip().startswith(last.strip()) and "keras_ddl/" not in "".join(lines[1:]), ended
    if kind == "callback":
        shown = run(["run", "-np", "2", "-x", "KERAS_DDL_ALL_FRAMES=1", "python", program, kind], tmp_path, env=env)
        assert "keras_patches" in shown.err and shown.err.rstrip().endswith(last), shown


def test_run_killed_rank_is_named_with_its_signal(tmp_path: Path):
    program = write_program(
        tmp_path, "if RANK == 1: here('pid'); Path('pid-1').write_text(str(os.getpid())); here('up')\ntime.sleep(600)"
    )
    started = Started(["run", "-np", "3", "python", program], tmp_path)
    started.wait_for(tmp_path / "up-1")
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    ended = started.finish()
    assert ended.status == 128 + 9, ended
    assert "rank 1 on host" in ended.err and "killed by SIGKILL" in ended.err, ended


def test_run_notes_of_tensorflow_come_once_where_wanted_and_explain_no_failure(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
import signal, keras, tensorflow as tf
tf.constant(1)
here("ready")
while not Path("ready-0").exists(): time.sleep(0.1)
if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
""",
    )
    ended = run(["run", "-np", "2", "--env", "TF_CPP_MIN_LOG_LEVEL=0", "python", program], tmp_path)
    assert ended.status == 128 + 9, ended
    for note in ("InitializeLog", "oneDNN", "cpu_feature_guard", "To enable the following instructions"):
        assert ended.err.count(note) <= 1, ended
    assert "InitializeLog" in ended.err  # else this shows nothing: TensorFlow has become silent
    cause, meaning = ended.err.splitlines()[-2:]
    assert cause.endswith("failed first, and the job was ended: killed by SIGKILL"), ended
    assert meaning.startswith("SIGKILL comes from outside of a program"), ended


def test_run_killed_wrapper_takes_its_program_along(tmp_path: Path):
    program = write_program(tmp_path, "Path(f'ppid-{RANK}').write_text(str(os.getppid())); here('up')\ntime.sleep(600)")
    started = Started(["run", "-np", "2", "python", program], tmp_path)
    started.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    os.kill(int((tmp_path / "ppid-1").read_text()), signal.SIGKILL)
    ended = started.finish()
    assert ended.status != 0
    assert "rank 1 on host" in ended.err and "lost" in ended.err, ended


def test_run_rank_that_ignores_sigterm_is_killed(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
import signal
if RANK == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here("ready")
    time.sleep(600)
while not Path("ready-0").exists(): time.sleep(0.02)
sys.exit(5)
""",
    )
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 5, ended


def test_run_detached_grandchildren_do_not_survive(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
import subprocess
subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
subprocess.Popen(["sleep", "600"])
print("started")
""",
    )
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 0, ended
    assert sorted(ended.out.splitlines()) == ["[1] started", "started"]


def test_run_logged_exception_is_no_failure(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
import logging
try: raise KeyError("caught")
except KeyError: logging.exception("logged by rank %d", RANK)
""",
    )
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 0, ended
    assert "[1] KeyError: 'caught'" in ended.err and "\nKeyError: 'caught'" in ended.err, ended
    assert "failed first" not in ended.err


def test_run_same_error_everywhere_is_shown_once(tmp_path: Path):
    program = write_program(tmp_path, "raise RuntimeError('all of us')")
    ended = run(["run", "-np", "3", "python", program], tmp_path)
    assert ended.status == 1
    assert ended.err.count("Traceback") == 1, ended
    assert ended.err.splitlines()[-1] == "RuntimeError: all of us"
    assert ended.err.startswith("keras-ddl: all 3 ranks failed alike, and the job was ended (exit status 1)."), ended


def test_run_consequence_is_not_taken_for_the_cause(tmp_path: Path):
    # Rank 0 notices first that rank 1 is gone, and rank 1 is slow to say why.
    program = write_program(
        tmp_path,
        """
from keras_ddl import errors
from keras_ddl.communicator import error_report
error_report.install(RANK, None)
if RANK == 0:
    raise errors.from_code(14, "rank 1 has left")
time.sleep(1)
raise ValueError("the cause")
""",
    )
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.err.splitlines()[-1] == "ValueError: the cause", ended
    assert "rank 1 on host" in ended.err and "RankLostError" not in ended.err, ended


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [("os.kill(os.getpid(), 9)", 128 + 9, "killed by SIGKILL"), ("sys.exit(3)", 3, "ended with exit status 3")],
)
def test_run_consequence_in_the_error_of_another_library_is_not_taken_for_the_cause(
    end: str, status: int, words: str, tmp_path: Path
):
    # As PyTorch does, whose code in C++ keeps an exception's text alone.
    program = write_program(
        tmp_path,
        f"""
import keras_ddl
from keras_ddl.errors import RankLostError
keras_ddl.init()
if RANK == 1:
    time.sleep(0.3)
    {end}
try:
    keras_ddl.barrier()
except RankLostError as error:
    text = str(error)
raise ValueError(f"of C++: {{text}} [at line 7]")
""",
    )
    ended = run(["run", "-np", "3", "python", program], tmp_path)
    assert ended.status == status, ended
    assert re.search(f"rank 1 on host .* failed first, and the job was ended: {words}", ended.err), ended


def test_run_rank_that_leaves_with_status_0_is_named_though_it_has_not_ended(tmp_path: Path):
    # The end of a process takes long: it is ended with the others.
    program = write_program(
        tmp_path,
        """
import atexit
atexit.register(time.sleep, 30)  # after keras_ddl has left
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
if RANK == 1: sys.exit(0)
keras_ddl.barrier()
""",
    )
    ended = run(["run", "-np", "3", "python", program], tmp_path)
    assert ended.status == 1, ended
    assert re.search(r"rank 1 on host .* failed first, and the job was ended: (left while|ended with)", ended.err), (
        ended
    )


def test_run_error_report_is_preferred_to_stderr(tmp_path: Path):
    # As keras_ddl.communicator leaves it. Nothing on stderr; the process is ended by MPI_Abort.
    program = write_program(
        tmp_path,
        """
import json
if RANK == 1:
    report = {"rank": 1, "host": "h", "time": time.time(), "type": "OSError", "summary": "OSError: disk",
              "traceback": "Traceback (most recent call last):\\n  File x\\nOSError: disk\\n"}
    Path(os.environ["KERAS_DDL_RUN_DIR"], "error-1.txt").write_text(json.dumps(report))
    os._exit(7)
time.sleep(600)
""",
    )
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 7, ended
    assert ended.err.endswith("Traceback (most recent call last):\n  File x\nOSError: disk\n"), ended


def test_run_mpi_program_without_keras_ddl_that_fails_is_ended(tmp_path: Path):
    # By mpi4py's own runner: otherwise rank 1 would wait in MPI_Finalize for rank 0, which waits for it in the barrier.
    program = write_program(
        tmp_path,
        """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise ValueError("in MPI")
MPI.COMM_WORLD.Barrier()
""",
    )
    ended = run(["run", "-np", "2", "--mpirun", "mpirun", "python", "-m", "mpi4py", program], tmp_path)
    assert ended.status != 0, ended
    assert ended.err.splitlines()[-1].endswith("ValueError: in MPI"), ended


def test_run_mpi_program_in_ranks_without_mpi_is_never_alone(tmp_path: Path):
    program = write_program(tmp_path, "from mpi4py import MPI\nprint(MPI.COMM_WORLD.size)")
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 1 and ended.out == "", ended
    assert "this rank was started without MPI; use keras-ddl run --mpirun mpirun" in ended.err, ended


def test_run_mpi_abort_is_told_without_boilerplate(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
from mpi4py import MPI
print("sum", MPI.COMM_WORLD.allreduce(1), flush=True)
if RANK == 1:
    MPI.COMM_WORLD.Abort(9)
time.sleep(600)
""",
    )
    ended = run(["run", "-np", "2", "--mpirun", "mpirun", "python", program], tmp_path)
    assert ended.status != 0, ended
    assert "sum 2" in ended.out
    assert ended.status == 9, ended


def test_run_timeout_ends_the_job(tmp_path: Path):
    program = write_program(tmp_path, "print('up', flush=True)\ntime.sleep(600)")
    ended = run(["run", "-np", "2", "--timeout", "2", "python", program], tmp_path)
    assert ended.status == 124, ended
    assert "did not end within 2 s" in ended.err


def test_run_program_that_cannot_be_executed_is_a_clear_error(tmp_path: Path):
    (tmp_path / "text").write_text("not a program\n")
    (tmp_path / "text").chmod(0o755)
    ended = run(["run", "-np", "2", "--", "./text"], tmp_path)
    assert ended.status == 126, ended
    assert "The program must be one that host" in ended.err, ended


def test_run_syntax_error_shows_the_end_of_stderr(tmp_path: Path):
    (tmp_path / "bad.py").write_text("x = = 1\n")
    ended = run(["run", "-np", "2", "bad.py"], tmp_path)
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "SyntaxError: invalid syntax", ended


def test_run_early_exit_of_a_rank_with_status_0_is_no_failure(tmp_path: Path):
    program = write_program(tmp_path, "if RANK == 0: time.sleep(1)\nprint('end')")
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 0, ended


@pytest.mark.parametrize("env", STARTERS)
def test_run_mpirun_that_dies_is_no_success(env: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path):
    program = write_program(tmp_path, "here('up')\ntime.sleep(600)")
    started = Started(["run", "-np", "2", "python", program], tmp_path, env=env)
    started.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    os.kill(starter(started.mark), signal.SIGKILL)
    ended = started.finish()
    assert ended.status != 0, ended
    assert f"{request.node.callspec.id} ended" in ended.err, ended
