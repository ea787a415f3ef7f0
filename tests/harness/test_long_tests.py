"""tests/long_tests.jsonl records files whose long tests all ran and passed; files changed since are reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import long_tests
from harness.source_modules import ROOT

FILES = {
    "tests/conftest.py": "from pathlib import Path\nfrom harness.long_tests import LongTests\n"
    "def pytest_configure(config):\n    root = Path(__file__).parents[1]\n"
    "    config.pluginmanager.register(LongTests(root / 'record', root))\n",
    "pytest.ini": "[pytest]\nmarkers = long\naddopts = -m 'not long'\n",
    "keras_ddl/__init__.py": "",
    "keras_ddl/ops/__init__.py": "from keras_ddl import files",
    "keras_ddl/files/__init__.py": "",
    "keras_ddl/cut/__init__.py": "",
    "tests/ops/test_a.py": "import pytest\nfrom pathlib import Path\n@pytest.mark.long\ndef test_one(): pass\n"
    "@pytest.mark.long\ndef test_two(): assert not Path('fails').exists()\ndef test_quick(): pass\n",
    "tests/cut/test_b.py": "import pytest\n@pytest.mark.long\ndef test_three(): pass\n",
}


def lay(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def stale(folder: Path, *options: str) -> list[str]:
    """Returns the files that a run of pytest reports at its end."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 1, 5), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line in FILES]


A, B = "tests/ops/test_a.py", "tests/cut/test_b.py"


def test_only_files_that_ran_completely_and_passed_are_recorded(tmp_path: Path) -> None:
    lay(tmp_path)
    assert stale(tmp_path) == []  # `make test` reports nothing
    assert stale(tmp_path, "-m", "", "-k", "one or three") == [A]
    assert stale(tmp_path, "-m", "", f"{A}::test_one") == [A]
    (tmp_path / "fails").touch()
    assert stale(tmp_path, "-m", "") == [A]
    (tmp_path / "fails").unlink()
    assert long_tests.read(tmp_path / "record").keys() == {B}
    assert stale(tmp_path, "-m", "", "-n", "2") == []
    assert long_tests.read(tmp_path / "record").keys() == {A, B}


def test_imported_modules_count_and_other_folders_do_not(tmp_path: Path) -> None:
    lay(tmp_path)
    assert stale(tmp_path, "-m", "long") == []
    (tmp_path / "keras_ddl/files/__init__.py").write_text("changed = True")
    assert stale(tmp_path, "-m", "", B) == [A]
    (tmp_path / "tests/harness").mkdir()
    (tmp_path / "tests/harness/new.py").touch()
    assert stale(tmp_path, "-m", "", "-k", "nothing_of_it_or_quick") == [B, A]


@pytest.mark.parametrize(
    ("file", "part"), [("tests/cut/test_specs.py", "keras_ddl/cut"), ("tests/project/docs/test_docs.py", "docs")]
)
def test_file_covers_its_folder_and_the_native_core(file: str, part: str) -> None:
    paths = {path.relative_to(ROOT).as_posix() for path in long_tests.covered(ROOT, ROOT / file)}
    assert {file, "native/core/src/api/ddl.cc", "keras_ddl/errors.py", "conftest.py"} <= paths
    assert any(path.startswith(f"{part}/") for path in paths)
    assert not any(path.startswith("native/tests/") for path in paths)
