"""keras-ddl run when a rank fails: the job ends soon, the first failure is explained last, and nothing is left behind.

test_supervisor.py tests the launcher's conclusions from reports. Here real ranks send the reports.
"""

import os
import re
import signal
from pathlib import Path

import pytest

from launch.launching import STARTERS, run, run_program, start_program, starter, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def test_run_exception_in_one_rank_ends_the_hanging_other(tmp_path: Path):
    source = """
if RANK == 1:
    print("before the error", flush=True)
    raise ValueError("no such thing: 42")
time.sleep(600)
"""
    ended = run_program(tmp_path, source)
    assert (ended.status, ended.out) == (1, "[1] before the error\n"), ended
    header, *_, last = ended.err.splitlines()
    assert re.fullmatch(r"keras-ddl: rank 1 on host .* failed first, .*\(exit status 1\):", header), ended
    assert last == "ValueError: no such thing: 42", ended
    assert ended.err.count("Traceback") == 1 and ended.err.count("no such thing") == 2, ended  # also in the code line


def test_run_names_a_rank_that_ends_before_all_have_met(tmp_path: Path):
    ended = run_program(tmp_path, "import keras_ddl\nif RANK == 1: sys.exit(0)\nkeras_ddl.init()")
    assert ended.status == 1, ended
    assert "RankLostError: rank 1 has left: its program ended before all ranks had connected" in ended.err, ended


def test_run_blames_the_rank_that_left_the_others_waiting(tmp_path: Path):
    # Not rank 0, which reports that rank 1 has left. Rank 2 raises its own error with that text, like PyTorch,
    # whose C++ code keeps only an exception's text.
    source = """
import keras_ddl
keras_ddl.init()
if RANK == 1: time.sleep(0.3); sys.exit(3)
try:
    keras_ddl.barrier()
except keras_ddl.errors.RankLostError as error:
    if RANK == 0: raise
    text = str(error)
raise ValueError(f"of C++: {text} [at line 7]")
"""
    ended = run_program(tmp_path, source, np=3)
    assert ended.status == 3, ended
    assert re.search("rank 1 on host .* failed first, .*: ended with exit status 3", ended.err), ended
    assert "RankLostError" not in ended.err, ended  # those errors are only consequences


def test_run_names_a_rank_that_ends_with_status_0_in_the_middle(tmp_path: Path):
    source = """
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
if RANK == 1: os._exit(0)
keras_ddl.barrier()
"""
    ended = run_program(tmp_path, source)
    assert ended.status == 1, ended
    last = ended.err.splitlines()[-1]
    how = "ended with status 0 in the middle of the job (sys.exit or os._exit?)"
    assert "rank 1 on host" in last and last.endswith(how), ended
    assert "RankLostError" not in ended.err and "Traceback" not in ended.err, ended


MISTAKES = """
import keras, numpy as np
import keras_ddl

class Break(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if KIND == "callback" and keras_ddl.rank() == 1:
            raise ValueError("my callback is wrong")

KIND = sys.argv[1]
strategy = keras_ddl.Strategy()
with strategy.scope():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
x = np.ones((8, 5 if KIND == "shape" else 4))
if KIND == "label":
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
model.fit(x, np.full(8, 7) if KIND == "label" else x[:, :1], batch_size=4, callbacks=[Break()], verbose=0)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "who", "last", "most"),
    [
        ("shape", "all 2 ranks failed alike", "ValueError: Input 0 ", 5),
        ("callback", "rank 1 on host ", "ValueError: my callback is wrong", 7),
        ("label", "", " [[{{node ", 12),
    ],
)
def test_run_shows_the_programs_frames_and_one_message(kind: str, who: str, last: str, most: int, tmp_path: Path):
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = run_program(tmp_path, MISTAKES, words=[kind], env=env)
    lines = [line for line in ended.err.splitlines() if not re.match(r"\s*\^+$|\[1\]|WARNING: All log|[IWE]0000", line)]
    assert ended.status == 1 and lines[0].startswith(f"keras-ddl: {who}"), ended
    assert "KERAS_DDL_ALL_FRAMES=1 shows all frames" in lines[0] and len(lines) <= most, ended
    assert lines[-1].strip().startswith(last.strip()) and "keras_ddl/" not in "".join(lines[1:]), ended
    if kind == "callback":
        shown = run_program(tmp_path, MISTAKES, "-x", "KERAS_DDL_ALL_FRAMES=1", words=[kind], env=env)
        assert "keras_patches" in shown.err and shown.err.rstrip().endswith(last), shown


@pytest.mark.long
def test_run_shows_tensorflows_notes_once_and_not_as_a_cause(tmp_path: Path):
    source = """
import signal, keras, tensorflow as tf
tf.constant(1)
here("ready")
while not Path("ready-0").exists(): time.sleep(0.1)
if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    ended = run_program(tmp_path, source, "--env", "TF_CPP_MIN_LOG_LEVEL=0")
    assert ended.status == 128 + 9, ended
    for note in ("InitializeLog", "oneDNN", "cpu_feature_guard", "To enable the following instructions"):
        assert ended.err.count(note) <= 1, ended
    assert "InitializeLog" in ended.err  # otherwise this test is void, because TensorFlow prints no notes
    cause, meaning = ended.err.splitlines()[-2:]
    assert cause.endswith("failed first, and the job was ended: killed by SIGKILL"), ended
    assert meaning.startswith("SIGKILL comes from another process"), ended


def test_run_killed_wrapper_ends_its_program(tmp_path: Path):
    source = "Path(f'ppid-{RANK}').write_text(str(os.getppid())); here('up')\ntime.sleep(600)"
    started = start_program(tmp_path, source)
    os.kill(int((tmp_path / "ppid-1").read_text()), signal.SIGKILL)
    ended = started.finish()
    assert ended.status != 0
    assert "rank 1 on host" in ended.err and "sent no report of its end" in ended.err, ended


def test_run_leaves_no_detached_grandchildren(tmp_path: Path):
    source = """
import subprocess
subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
subprocess.Popen(["sleep", "600"])
print("started")
"""
    ended = run_program(tmp_path, source)
    assert ended.status == 0 and sorted(ended.out.splitlines()) == ["[1] started", "started"], ended


@pytest.mark.long
def test_run_ends_a_failing_mpi_program_without_keras_ddl(tmp_path: Path):
    # With mpi4py's own runner; otherwise rank 1 would wait in MPI_Finalize for rank 0, which waits in the barrier.
    program = write_program(
        tmp_path,
        "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: raise ValueError('in MPI')\nMPI.COMM_WORLD.Barrier()",
    )
    ended = run(["run", "-np", "2", "--mpirun", "mpirun", "python", "-m", "mpi4py", program], tmp_path)
    assert ended.status != 0 and ended.err.splitlines()[-1].endswith("ValueError: in MPI"), ended


def test_run_refuses_mpi_programs_in_ranks_without_mpi(tmp_path: Path):
    ended = run_program(tmp_path, "from mpi4py import MPI\nprint(MPI.COMM_WORLD.size)")
    assert ended.status == 1 and ended.out == "", ended
    assert "this rank was started without MPI; use keras-ddl run --mpirun mpirun" in ended.err, ended


def test_run_mpi_abort_gives_the_job_its_status(tmp_path: Path):
    source = """
from mpi4py import MPI
print("sum", MPI.COMM_WORLD.allreduce(1), flush=True)
if RANK == 1:
    MPI.COMM_WORLD.Abort(9)
time.sleep(600)
"""
    ended = run_program(tmp_path, source, "--mpirun", "mpirun")
    assert ended.status == 9 and "sum 2" in ended.out, ended


def test_run_program_that_cannot_be_executed_is_a_clear_error(tmp_path: Path):
    (tmp_path / "text").write_text("not a program\n")
    (tmp_path / "text").chmod(0o755)
    ended = run(["run", "-np", "2", "--", "./text"], tmp_path)
    assert ended.status == 126 and "The program must be one that host" in ended.err, ended


@pytest.mark.parametrize("env", STARTERS)
def test_run_fails_if_mpirun_dies(env: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path):
    started = start_program(tmp_path, "here('up')\ntime.sleep(600)", env=env)
    os.kill(starter(started.mark), signal.SIGKILL)
    ended = started.finish()
    assert ended.status != 0 and f"{request.node.callspec.id} ended" in ended.err, ended
