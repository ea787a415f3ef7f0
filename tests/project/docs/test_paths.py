"""Files and folders that the README, the pages and the picture of the line name are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "export", "keras_ddl", "native", "notebooks", "tests", "tools")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
        if PATH.fullmatch(word) and not any(ROOT.glob(word)):
            found.append(word)
        if SOURCE.fullmatch(word) and word not in OTHERS and not any(path.match(word) for path in sources):
            found.append(word)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_files_that_exist(page: Path, sources: list[Path]) -> None:
    assert missing(in_backticks(page), sources) == []


def test_map_names_files_of_its_folders() -> None:
    """In a row of the map, `file.py` and `folder/` after a folder lie in that folder, or further inside."""
    lost, seen = [], 0
    for line in (ROOT / "docs" / "development.md").read_text(encoding="utf-8").splitlines():
        folders = [ROOT / name for name in re.findall(r"`([\w/]+)/`", line.partition(" | ")[0])]
        names = re.findall(r"`(\w+(?:\.py|/))`", line.partition(" | ")[2]) if line.startswith("| `") else []
        inside = [name for name in names if folders and not (ROOT / name).exists()]
        seen += len(inside)
        lost += [name for name in inside if not any(any(folder.rglob(name.strip("/"))) for folder in folders)]
    assert lost == []
    assert seen > 15


def test_walks_name_many_files() -> None:
    """Else the test above would pass by not finding them."""
    named = {word for word in in_backticks(ROOT / "docs" / "development.md") if PATH.fullmatch(word)}
    assert len(named) > 60


def test_picture_names_folders_that_exist() -> None:
    drawn = (ROOT / "docs" / "pictures" / "the_line.svg").read_text(encoding="utf-8")
    named = re.findall(r'class="path"[^>]*>([^<]+)<', drawn)
    assert len(named) > 10
    assert [word for word in named if not (ROOT / word).is_dir()] == []
