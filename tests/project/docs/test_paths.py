"""Files and folders that the README, the pages and the picture of the line name are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.pages import PAGES, READMES, in_missing_part

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "keras_ddl", "native", "notebooks", "tests", "tools")
FOLDERS += ("export", "integrations", "observe", "serving")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*")
SOURCE = re.compile(r"[\w*/]+\.(?:cc|h)")  # in native/, by the end of its path
OTHERS = {"mpi.h"}


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "native"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines()]


def in_backticks(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [word for code in re.findall(r"`([^`\n]+)`", prose) for word in code.split()]


def missing(words: list[str], sources: list[Path]) -> list[str]:
    found = []
    for word in words:
        if PATH.fullmatch(word) and not any(ROOT.glob(word)) and not in_missing_part(ROOT / word):
            found.append(word)
        if SOURCE.fullmatch(word) and word not in OTHERS and not any(path.match(word) for path in sources):
            found.append(word)
    return found


@pytest.mark.parametrize("page", PAGES + READMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_files_that_exist(page: Path, sources: list[Path]) -> None:
    assert missing(in_backticks(page), sources) == []


@pytest.mark.parametrize("page", READMES[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_readme_of_a_folder_lists_its_files(page: Path) -> None:
    """Each module and folder once; `__init__.py` where it is more than a docstring or imports."""
    listed = re.findall(r"^- \[?`(\S+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    beside = {f"{path.name}/" if path.is_dir() else path.name for path in page.parent.iterdir()}
    beside -= {"README.md", "part.toml", "py.typed", "conftest.py", "tests/", "docs/", "__pycache__/"}
    beside = {name for name in beside if not name.endswith(".so") and not in_missing_part(page.parent / name)}
    listed = [name for name in listed if not in_missing_part(page.parent / name)]
    assert set(listed) - {"__init__.py"} == beside - {"__init__.py"}


def test_walks_name_many_files() -> None:
    """Else the test above would pass by not finding them."""
    named = {word for word in in_backticks(ROOT / "docs" / "development.md") if PATH.fullmatch(word)}
    assert len(named) > 60


def test_picture_names_folders_that_exist() -> None:
    drawn = (ROOT / "docs" / "pictures" / "the_line.svg").read_text(encoding="utf-8")
    named = re.findall(r'class="path"[^>]*>([^<]+)<', drawn)
    assert len(named) > 10
    assert [word for word in named if not (ROOT / word).is_dir()] == []
