"""Child processes of a rank that run its script again: they are no ranks, and a script that makes them so ends."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.launching import Started, run_program, write_program

pytestmark = pytest.mark.parallel


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path, which may be too long: multiprocessing's socket lies in it, whose path has 107 bytes at most."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


METHODS = ["spawn", pytest.param("forkserver", marks=pytest.mark.long)]


@pytest.mark.parametrize("method", METHODS)
def test_script_that_starts_at_its_top_is_ended_when_a_child_imports_it(method: str, folder: Path) -> None:
    source = f"""
import multiprocessing
import keras_ddl
open("started", "a").write(f"{{os.getpid()}} ")
keras_ddl.init()
if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(1) as pool:  # which makes another child for each that ends
        pool.map(abs, [1])
"""
    last = last_line_of(source, folder)
    assert last.startswith("keras_ddl.errors.NotInitializedError: ") and 'if __name__ == "__main__":' in last
    # Ranks, the children that were refused, and what was on its way meanwhile: some 6.
    assert len((folder / "started").read_text().split()) < 50


@pytest.mark.parametrize("method", METHODS)
def test_script_that_starts_a_pool_at_its_top_is_ended_before_it_is_a_rank(method: str, folder: Path) -> None:
    # Its children are refused by Python itself, and the pool would make others for ever.
    source = f"""
import multiprocessing
import keras_ddl
with multiprocessing.get_context("{method}").Pool(1) as pool:
    pool.map(abs, [1])
keras_ddl.init()
"""
    last = last_line_of(source, folder)
    assert last.startswith("RuntimeError: A script must start processes only under `if __name__"), last
    assert "Received: program.py:8 in process" in last, last


def last_line_of(source: str, folder: Path) -> str:
    """Runs a program that fails; returns the last line that is shown."""
    started = Started(["run", "-np", "2", "python", write_program(folder, source)], folder)
    started.may_leave = ("pymp-",)  # multiprocessing's own
    ended = started.finish()
    assert ended.status != 0, ended
    return ended.err.splitlines()[-1]


@pytest.mark.long
def test_child_that_does_its_work_under_the_guard_is_left_alone(folder: Path) -> None:
    source = """
import multiprocessing
import keras_ddl

def ask(_):
    try:
        keras_ddl.init()
    except keras_ddl.errors.NotInitializedError as error:
        return "own process" in str(error)

if __name__ == "__main__":
    keras_ddl.init()
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(*pool.map(ask, [1]), flush=True)
    keras_ddl.barrier()
"""
    ended = run_program(folder, source)
    assert ended.status == 0 and sorted(ended.out.splitlines()) == ["True", "True", "[1] True", "[1] True"], ended
