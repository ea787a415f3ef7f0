"""The models that exports are tested on, trained once per session, and the processes that export and serve them."""

from __future__ import annotations

import sys
from pathlib import Path

# By path: `tests` is on sys.path, but the name `export` is also the package at the repository's root.
sys.path.insert(0, str(Path(__file__).parent))
