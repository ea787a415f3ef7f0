"""Shows examples in a command's help, which click leaves unwrapped after \\b, as code blocks."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

_UNWRAPPED = "| "  # sphinx-click's prefix of a line that click does not wrap


def as_code(app: Sphinx, context: Any, lines: list[str]) -> None:
    result: list[str] = []
    for line in lines:
        is_example = line.startswith(_UNWRAPPED)
        if is_example and not (result and result[-1].startswith("    ")):
            result += [".. code-block:: text", ""]
        result.append("    " + line.removeprefix(_UNWRAPPED) if is_example else line)
    lines[:] = result


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("sphinx-click-process-description", as_code)
    return {"parallel_read_safe": True}
