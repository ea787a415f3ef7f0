"""How docs/extensions reads docstrings: every habit of this code base, as reStructuredText."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[3] / "docs" / "extensions" / "docstrings.py"


@pytest.fixture(scope="module")
def docstrings() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FILE.parent))  # it imports a file beside it
    spec = importlib.util.spec_from_file_location("docstrings", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FILE.parent))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`op` of `keras_ddl.init()`s", r"``op`` of :py:obj:`keras_ddl.init() <keras_ddl.init>`\ s"),
        ("a RankLostError: see docs/errors.md", "a :py:exc:`~keras_ddl.errors.RankLostError`: see "
         ":doc:`docs/errors.md </docs/errors>`"),
        ("2 * |a_b|", r"2 \* \|a\_b\|"),
        ("`|a| * b_`", "``|a| * b_``"),
    ],
)  # fmt: skip
def test_inline_markup_of_a_line(docstrings: ModuleType, text: str, expected: str) -> None:
    assert docstrings.inline(text) == expected


def test_sections_of_a_docstring(docstrings: ModuleType) -> None:
    lines = [
        "Reduces.",
        "",
        "    with scope():",
        "        pass",
        "",
        "Args:",
        "    op, name: as in `all_reduce`,",
        "        on all ranks.",
        "    check: a tolerance.",
        "Returns: shape [n]; for others",
        "    the rows: all.",
        "Raises:",
        "    ConfigError: a scalar.",
        "    the exception of the rank",
        "        that failed first.",
        "",
        "Cost: none.",
    ]
    assert [line for line in docstrings.translate(lines) if line] == [
        "Reduces.",
        ".. code-block:: text",
        "    with scope():",
        "        pass",
        ":Args:",
        "    - **op, name**: as in ``all_reduce``, on all ranks.",
        "    - **check**: a tolerance.",
        ":Returns: shape [n]; for others the rows: all.",
        ":Raises:",
        "    - :py:exc:`~keras_ddl.errors.ConfigError`: a scalar.",
        "    - the exception of the rank that failed first.",
        ":Cost: none.",
    ]
