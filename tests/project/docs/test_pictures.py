"""The pictures of docs/ equal the output of their scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_picture_equals_its_scripts_output(picture: Path) -> None:
    program = f"import {picture.stem}; print({picture.stem}.draw(), end='')"
    drawn = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(FOLDER)}, capture_output=True, text=True, check=True
    ).stdout
    assert picture.read_text(encoding="utf-8") == drawn, f"run python docs/pictures/{picture.stem}.py"
