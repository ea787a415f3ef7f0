"""The pages of documentation: those of docs/, those of each part, and the READMEs of folders."""

from __future__ import annotations

import os
from pathlib import Path

from harness.source_modules import PARTS, ROOT
from keras_ddl import parts

PAGES = sorted((ROOT / "docs").rglob("*.md")) + sorted(
    page for folder in PARTS.values() for page in (folder / "docs").glob("*.md")
)
READMES = [ROOT / "README.md"] + sorted(
    page
    for folder in ("keras_ddl", "export", "serving", "integrations", "observe")
    for page in (ROOT / folder).rglob("README.md")
)


def in_missing_part(path: Path) -> bool:
    """Whether a path lies in the folder of a part that this checkout does not have: pages may lead there."""
    inside = os.path.normpath(path)
    return any(inside.startswith(f"{ROOT / each}/") for name, each in parts.FOLDERS.items() if name not in PARTS)
