"""The release workflow: its commands exist, and it publishes nothing unless it is switched on."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = ROOT / ".github" / "workflows" / "release.yml"


def read(path: Path) -> dict[str, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in found.items()}  # YAML 1.1 reads `on` as true


def commands(path: Path) -> list[str]:
    """Returns the lines that a workflow runs in a shell."""
    steps = [step for job in read(path)["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines() if line.strip()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_exist(path: Path) -> None:
    lines = commands(path)
    assert lines
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)
    for line in lines:
        first, *words = shlex.split(line)
        assert first == "python" or "/clean/bin/" in first or shutil.which(first), line
        if first == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), line
        for word in words:
            if re.fullmatch(r"(examples|tools|tests|benchmarks)/[\w./]+", word):
                assert (ROOT / word).is_file(), line
        for extra in re.findall(r"\[(\w+)\]\"?$", line):
            assert extra in extras, line


def test_tag_is_compared_with_the_built_version() -> None:
    (line,) = [line for line in commands(RELEASE) if "GITHUB_REF_NAME" in line]
    version = re.search(r"(?m)^version\s*=\s*(\S+)", (ROOT / "setup.cfg").read_text(encoding="utf-8"))
    assert version
    for tag, status in ((f"v{version[1]}", 0), (version[1], 1), (f"v{version[1]}0", 1)):
        assert (
            subprocess.run(
                ["bash", "-c", line], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
            ).returncode
            == status
        )


def test_nothing_is_published_by_accident() -> None:
    release = read(RELEASE)
    assert list(release["on"]["push"]) == ["tags"] and release["permissions"] == {"contents": "read"}
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "release"
    assert publish["needs"] == "build" and "vars.PUBLISH == 'true'" in publish["if"] and "'tag'" in publish["if"]
    text = RELEASE.read_text(encoding="utf-8")
    assert not re.search(r"password|secrets\.|://", text)
