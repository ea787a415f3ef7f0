"""The docstrings of this project, which are Google's style with Markdown's backticks, in the words of Sphinx.

    Args:                          a list of `name: text`, longer text indented
    Returns: text                  on the same line or indented below; so are Raises, Cost, Attributes
    an indented paragraph          code

Names of keras_ddl in backticks become links, which the strict build checks; so do errors and pages of docs/, wherever
they are named.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from missing_parts import is_missing
from sphinx.application import Sphinx

from keras_ddl import errors

ROOT = Path(__file__).resolve().parents[2]

_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Cost):(?: (.+))?$")
_ENTRY = re.compile(r"([*\w]+(?:, [*\w]+)*)(?: \([^)]*\))?: ")
_ERRORS = errors.__all__
_INLINE = re.compile(rf"`([^`]+)`|\b({'|'.join(_ERRORS)})\b|\b((?:[\w/]+/)?docs/[\w/-]+)\.md|([*|_\\])")
_NAME = re.compile(r"(keras_ddl(?:\.\w+)+)(?:\(\))?")


def inline(text: str) -> str:
    """Returns one line of a docstring as reStructuredText."""

    def translated(match: re.Match[str]) -> str:
        code, error, page, special = match.groups()
        if special:
            return "\\" + special
        if error:
            return f":py:exc:`~keras_ddl.errors.{error}`"
        if page:
            # A page of a part that is not here is named without a link.
            return f":doc:`{page}.md </{page}>`" if (ROOT / f"{page}.md").exists() else f"{page}.md"
        # Markup must end at a word's end: `LearningRateSchedule`s.
        end = "\\ " if text[match.end() : match.end() + 1].isalnum() else ""
        name = _NAME.fullmatch(code)
        return (f":py:obj:`{code} <{name[1]}>`" if name and not is_missing(name[1]) else f"``{code}``") + end

    return _INLINE.sub(translated, text)


def section(title: str, lines: list[str]) -> list[str]:
    """Returns a section as one field: entries become a list, a single text a paragraph."""
    entries: list[list[str]] = []
    for line in textwrap.dedent("\n".join(lines)).strip("\n").splitlines():
        if line.startswith(" ") and entries:
            entries[-1].append(line.strip())
        elif line:
            entries.append([line])
    texts = []
    for entry in entries:
        text = inline(" ".join(entry))
        if title in ("Args", "Attributes"):
            named = _ENTRY.match(" ".join(entry))
            if named:
                text = f"**{inline(named[1])}**: {inline(' '.join(entry)[named.end() :])}"
        texts.append(text)
    if title not in ("Args", "Attributes", "Raises"):
        return [f":{title}: {' '.join(texts)}", ""]
    if len(texts) == 1 and title == "Raises":
        return [f":{title}: {texts[0]}", ""]
    return [f":{title}:", *(f"    - {text}" for text in texts), ""]


def translate(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring (dedented) as reStructuredText."""
    result: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        match = _SECTION.match(line)
        end = index + 1
        if match:
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            body = [f"    {match[2]}"] if match[2] else []
            # What continues the line of the title belongs to the same text, however it is indented.
            rest = lines[index + 1 : end]
            body += [f"        {each.strip()}" for each in rest] if match[2] else rest
            result += ["", *section(match[1], body)]
        elif line.startswith("    ") and (not result or not result[-1].strip()):
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            result += [".. code-block:: text", "", *lines[index:end], ""]
        else:
            result.append(inline(line))
        index = end
    return result


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", lambda *args: args[-1].__setitem__(slice(None), translate(args[-1])))
    return {"parallel_read_safe": True}
