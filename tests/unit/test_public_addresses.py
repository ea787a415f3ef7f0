"""A public name has one address: it is defined in the module or folder under whose name it is documented."""

from __future__ import annotations

import importlib
import re

import pytest

from harness.source_modules import PARTS, ROOT
from keras_ddl import parts

# Exceptions: shortcuts of `import keras_ddl`; front ends, which rename objects of other modules; and
# keras_ddl.timeline, whose records the communicator writes, which must not import it.
ELSEWHERE = re.compile(r"keras_ddl(\.(horovod|ddl|torch)(\..*)?|\.timeline)?")


def documented() -> list[tuple[str, str]]:
    pairs = []
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    for page in pages + [path for folder in PARTS.values() for path in folder.glob("docs/api.md")]:
        module = "keras_ddl"
        for line in page.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"\.\. (current|auto)module:: (\S+)", line):
                module = match[2]
            elif match := re.match(r"\.\. auto(?:function|class|exception):: (\w+)", line):
                pairs.append((module, match[1]))
    return pairs


def test_documented_names_are_defined_where_they_are_documented() -> None:
    pytest.importorskip("tensorflow")
    elsewhere = {}
    of_parts = {name for part in parts.installed() for name in part.provides}
    for module, name in documented():
        if f"{module.removeprefix('keras_ddl.')}.{name}" in of_parts:
            continue
        home = getattr(importlib.import_module(module), name).__module__ if not ELSEWHERE.fullmatch(module) else module
        if home != module and not home.startswith(f"{module}."):
            elsewhere[f"{module}.{name}"] = home
    assert elsewhere == {}


# Modules that users write; other modules of keras_ddl.horovod are reached through its names.
ENTRIES = {module for module, _ in documented() if not re.match(r"keras_ddl\.horovod\.(?!keras$)", module)}


def test_tab_completion_shows_only_public_names() -> None:
    pytest.importorskip("tensorflow")
    imported = {"Any", "Callable", "Path", "Sequence", "TYPE_CHECKING", "annotations", "importlib", "math", "np", "tf"}
    assert len(ENTRIES) > 5
    for module in sorted(ENTRIES if parts.is_missing("ddl") else ENTRIES | {"keras_ddl.ddl"}):
        shown = set(dir(importlib.import_module(module)))
        assert shown >= {name for each, name in documented() if each == module}, module
        assert {name for name in shown if name.startswith("_")} <= {"__version__"}, module
        assert shown & imported == set(), module
