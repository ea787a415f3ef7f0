"""Parts can be deleted: the rest of the wheel imports, and reports the missing part when it is needed."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from harness.packaging_tools import run
from keras_ddl import parts


@pytest.fixture(scope="session")
def installations(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Returns part -> output of an installation without it."""
    folder = tmp_path_factory.mktemp("without")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    program = Path(__file__).with_name("without_parts.py")
    return json.loads(run(sys.executable, program, folder, cwd=folder, PYTHONPATH=str(folder)).splitlines()[-1])


def test_wheel_has_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if "/tests/" in name or "top_level" in name] == []


@pytest.mark.long
@pytest.mark.parametrize("part", parts.FOLDERS)
def test_everything_else_works_without_a_part(part: str, installations: dict[str, dict[str, str]]) -> None:
    said = installations[part]
    assert {what: text for what, text in said.items() if what.startswith("import ")} == {}
    missing = f"the part '{part}' of keras_ddl, which must be installed"
    assert missing in said["module"] and missing in said["attribute"]
    assert said["help"].startswith("0 ") and said["help of run"].startswith("0 ")
    for word in parts.words_of(part):
        if "." in word or word == "ddlrun":
            continue
        assert said[word].startswith("2 ") and missing in said[word], (word, said[word])
        assert f"  {word}  " not in said["help"] + said["help of run"]
