"""Nothing shown goes unrun: the README's script and commands, and the Python blocks of every page of docs/."""

from __future__ import annotations

import multiprocessing
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("keras-ddl")
# Its processes are forked from one that has imported what takes seconds, and has done nothing else.
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["keras_ddl", "keras", "tensorflow"])
# What it forks imports nothing of the tests.
RUN = """
import os, runpy, sys
os.chdir({folder!r})
with open("output", "w") as output:
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
sys.argv = ["page.py"]
runpy.run_path("page.py", run_name="__main__")
"""
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_readme_script_trains_and_exports(tmp_path: Path) -> None:
    script, *rest = blocks(ROOT / "README.md", "python")
    assert rest == [], "the README has one script; longer things belong into docs/ and examples/"
    assert len([line for line in script.splitlines() if line.strip()]) <= 22
    (tmp_path / "train.py").write_text(script)
    commands = [b for b in blocks(ROOT / "README.md", "sh") if "train.py" in b]
    assert len(commands) == 1
    output = ""
    for line in commands[0].splitlines():
        program, *arguments = line.split()
        assert program == "keras-ddl"
        output += run([str(COMMAND), *arguments], tmp_path)
    assert "Epoch 5/5" in output
    assert (tmp_path / "saved_model" / "1" / "saved_model.pb").exists()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.stem)
def test_docs_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The blocks of one page are one script. One rank will do: what ranks do together is tested elsewhere."""
    (tmp_path / "page.py").write_text("\n\n".join(blocks(page, "python")))
    (tmp_path / "run.py").write_text(RUN.format(folder=str(tmp_path)))
    process = FRESH.Process(target=runpy.run_path, args=(str(tmp_path / "run.py"),))
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0, (tmp_path / "output").read_text()[-6000:]


def anchors(page: Path) -> set[str]:
    """The headings of a page as its links spell them: lower case, no punctuation, hyphens for spaces."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_docs_links_lead_somewhere() -> None:
    """Also those of the README, which `make docs` does not see."""
    broken = []
    for page in [ROOT / "README.md", *PAGES]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            if target.startswith(("http://", "https://")):
                continue
            there = page.parent / target if target else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{page.name} -> {target}#{anchor}")
    assert broken == []


def test_docs_commands_exist() -> None:
    """Every `make` target and `keras-ddl` command that a page names is there."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    known = run([str(COMMAND), "--help"], ROOT)
    for page in [ROOT / "README.md", *PAGES]:
        text = page.read_text(encoding="utf-8")
        for block in blocks(page, "sh"):
            for target in re.findall(r"^make ([a-z]+)", block, re.MULTILINE):
                assert target in targets, f"{page.name}: make {target}"
        for name in re.findall(r"keras-ddl ([a-z]+)\b", text):
            assert re.search(rf"^\s+{name}\b", known, re.MULTILINE), f"{page.name}: keras-ddl {name}"
