"""Lets the export tests import the programs beside them."""

import sys
from pathlib import Path

# By path: `tests` is on sys.path, but the name `export` is also the package at the repository's root.
sys.path.insert(0, str(Path(__file__).parent))
