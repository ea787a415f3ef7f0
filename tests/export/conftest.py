"""The models that exports are tested on, trained once per session, and the processes that export and serve them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# By path: `tests` is on sys.path, but the name `export` is also the package at the repository's root.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def foreign_directory() -> Iterator[Path]:
    """A directory that this process may read and not write to; root, who may do anything, is another user meanwhile."""
    parent = Path(tempfile.mkdtemp())  # not tmp_path: other users may not enter pytest's directories
    parent.chmod(0o755)
    locked = parent / "locked"
    locked.mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield locked
    finally:
        os.seteuid(user)
        locked.chmod(0o755)
        shutil.rmtree(parent)
