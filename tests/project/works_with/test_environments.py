"""The tests in this folder are skipped if pip reaches no registry, and for no other reason."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from works_with import environments

from harness.pages import PAGES

UNREACHABLE = "ERROR: Could not find a version that satisfies the requirement grain==0.2.18 (from versions: none)"
NO_SUCH_VERSION = "ERROR: No matching distribution found for grain==99 (from versions: 0.2.17, 0.2.18)"


@pytest.mark.parametrize(("text", "outcome"), [(UNREACHABLE, pytest.skip.Exception), (NO_SUCH_VERSION, AssertionError)])
def test_only_an_unreachable_registry_skips_a_test(tmp_path: Path, text: str, outcome: type[BaseException]) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {shlex.quote(text)} >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(outcome, match="from versions"):
        environments._install(python, "grain")


def test_one_command_installs_keras_hub_with_its_imports() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in PAGES}
    assert [name for name, text in pages.items() if "pip install --no-deps" in text and "keras-hub==" in text] == [
        "install.md"
    ]
    (line,) = [line for line in pages["install.md"].splitlines() if "kagglehub==" in line]
    assert {"tokenizers", "sentencepiece", "regex"} <= set(line.split())
