"""Examples in the help of a command, which click keeps as they are after \\b, are code."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

_KEPT = "| "  # what sphinx-click puts in front of such a line


def as_code(app: Sphinx, context: Any, lines: list[str]) -> None:
    result: list[str] = []
    for line in lines:
        kept = line.startswith(_KEPT)
        if kept and not (result and result[-1].startswith("    ")):
            result += [".. code-block:: text", ""]
        result.append("    " + line.removeprefix(_KEPT) if kept else line)
    lines[:] = result


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("sphinx-click-process-description", as_code)
    return {"parallel_read_safe": True}
