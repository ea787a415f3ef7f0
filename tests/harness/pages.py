"""Lists the pages of documentation: in docs/, in each part, READMEs of folders, and those beside programs."""

from __future__ import annotations

from harness.source_modules import ROOT, structure

_PROJECT = structure("sources").Project(ROOT)
READMES = [page for page in _PROJECT.pages if page.name == "README.md"]
PAGES = [page for page in _PROJECT.pages if page.name != "README.md"]
# Figures and walk-throughs: their commands and names are checked, but they have no Python to run.
BESIDE = _PROJECT.beside
