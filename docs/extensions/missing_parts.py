"""Builds the site even if the folders of some parts are missing.

A link to a page of a missing part becomes plain text, and its line in a toctree is dropped. All other broken links stay
errors.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

from keras_ddl.parts import FOLDERS as FOLDERS_OF_PARTS
from keras_ddl.parts import part_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(FOLDERS_OF_PARTS.values())
# Also integrations/ and observe/ as a whole.
MISSING = tuple(
    folder
    for folder in sorted({*FOLDERS, *(each.partition("/")[0] for each in FOLDERS)})
    if not (ROOT / folder).is_dir()
)
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()#\s]+)[^()]*\)")
_ENTRY = re.compile(r"^/(\S+)\n", re.MULTILINE)


def is_missing(name: str) -> bool:
    """Returns whether `keras_ddl.x.y` lies in a part whose folder is missing."""
    part = part_of(name) or f"{name}.".split(".")[1]  # a callback of a part has its name in keras_ddl.callbacks
    return FOLDERS_OF_PARTS.get(part) in MISSING


def without(text: str, folder: str, missing: tuple[str, ...]) -> str:
    """Returns a page without links into missing parts.

    Args:
        folder: the page's folder, relative to the repository.
        missing: folders of missing parts.
    """

    def is_in_missing(path: str) -> bool:
        return any(path.startswith(f"{each}/") for each in missing)

    def link(match: re.Match[str]) -> str:
        return match[1] if is_in_missing(os.path.normpath(Path(folder, match[2]))) else match[0]

    def entry(match: re.Match[str]) -> str:
        return "" if is_in_missing(match[1]) else match[0]

    return _ENTRY.sub(entry, _LINK.sub(link, text))


def read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = without(source[0], str(Path(page).parent), MISSING)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
