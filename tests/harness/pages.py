"""The pages of documentation: those of docs/, those of each part, and the READMEs of folders."""

from __future__ import annotations

from harness.source_modules import ROOT, structure

_ALL = structure("sources").Project(ROOT).pages
READMES = [page for page in _ALL if page.name == "README.md"]
PAGES = [page for page in _ALL if page.name != "README.md"]
