"""keras-ddl run removes what a rank's libraries leave behind when a signal ends the rank."""

import sys
from pathlib import Path

import pytest

from launch.launching import Started, run_program, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


@pytest.mark.long
def test_run_lets_joblib_remove_its_semaphores(tmp_path: Path):
    program = write_program(
        tmp_path,
        """
from joblib import Parallel, delayed
Parallel(n_jobs=2)(delayed(abs)(i) for i in range(4))
Path(f"pid-{RANK}").write_text(str(os.getpid()))
while not all(os.path.exists(f"pid-{rank}") for rank in (0, 1)): time.sleep(0.05)
assert list(Path("/dev/shm").glob(f"sem.loky-{os.getpid()}-*"))
if RANK == 1: os.kill(os.getpid(), 9)
time.sleep(600)
""",
    )
    started = Started(["run", "-np", "2", "python", program], tmp_path)
    started.may_leave = ("joblib_memmapping_folder_",)
    ended = started.finish()
    assert ended.status == 128 + 9, ended
    pids = [(tmp_path / f"pid-{rank}").read_text() for rank in (0, 1)]
    assert [path.name for pid in pids for path in Path("/dev/shm").glob(f"sem.loky-{pid}-*")] == [], ended


@pytest.mark.long
def test_run_removes_code_generated_by_tensorflow(tmp_path: Path):
    source = """
from keras_ddl.compat.tensorflow import tf
@tf.function
def f(x):
    if x > 0: return x
    return -x
f(tf.constant(1))
os.kill(os.getpid(), 9)
"""
    ended = run_program(tmp_path, source, np=1)  # checks the directory
    assert ended.status == 128 + 9, ended


def test_run_does_not_need_a_home(tmp_path: Path):
    program = write_program(tmp_path, "import keras_ddl; keras_ddl.init(); print('met', flush=True)")
    words = [sys.executable, "-m", "keras_ddl.cli", "run", "-np", "2", "python", program]
    main = ("-c", f"import os; os.environ.pop('HOME', None); os.execv({words[0]!r}, {words!r})")
    ended = Started([], tmp_path, main=main).finish()
    assert ended.status == 0 and ended.out.count("met") == 2, ended
