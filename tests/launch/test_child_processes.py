"""A rank's child processes that run its script again are not ranks; a script that creates them so is ended."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.launching import Started, run_program, write_program

pytestmark = pytest.mark.parallel


@pytest.fixture
def folder() -> Iterator[Path]:
    """Replaces tmp_path, which may be too long for the path of multiprocessing's socket (at most 107 bytes)."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


METHODS = ["spawn", pytest.param("forkserver", marks=pytest.mark.long)]


@pytest.mark.parametrize("method", METHODS)
def test_script_without_guard_is_ended_when_a_child_imports_it(method: str, folder: Path) -> None:
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
    # About 6: ranks, the refused children, and children started meanwhile.
    assert len((folder / "started").read_text().split()) < 50


@pytest.mark.parametrize("method", METHODS)
def test_script_with_unguarded_pool_is_ended_before_it_is_a_rank(method: str, folder: Path) -> None:
    # Python itself refuses its children, and the pool would create new ones forever.
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
    """Runs a program that fails; returns the last line of the output."""
    started = Started(["run", "-np", "2", "python", write_program(folder, source)], folder)
    started.may_leave = ("pymp-",)  # multiprocessing's own
    ended = started.finish()
    assert ended.status != 0, ended
    return ended.err.splitlines()[-1]


@pytest.mark.long
def test_guarded_child_is_left_alone(folder: Path) -> None:
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
