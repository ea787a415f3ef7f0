"""Runs everything that the docs show: the README's script and commands, and the Python blocks of every page."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.pages import BESIDE, PAGES
from harness.serving import serving
from harness.without_mpi import environment as rank_environment

ROOT = Path(__file__).resolve().parents[3]
COMMAND = Path(sys.executable).with_name("keras-ddl")
# Processes are forked from one that has imported the slow modules, and has done nothing else.
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["keras_ddl", "keras", "tensorflow"])
# A forked process imports nothing of the tests. A page's ranks meet like those of `keras-ddl run` on one host.
RUN = """
import atexit, os, runpy, sys
os.chdir({folder!r})
with open("output.{rank}", "w") as output:
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
os.environ.update({environment!r})
sys.argv = ["page.py"]
runpy.run_path("page.py", run_name="__main__")
atexit._run_exitfuncs()  # multiprocessing skips these, but a rank needs them to leave the job
"""
ABOUT_RANKS = ("strategy", "from-ddl", "collectives")  # `make test` runs these on two ranks, the others on one
ONE_PROCESS = ("notebooks", "serving")  # not on ranks: one starts its own, the other does not use any


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder in which the README's script was saved, and its commands were run."""
    folder = tmp_path_factory.mktemp("readme")
    script, *rest = blocks(ROOT / "README.md", "python")
    assert rest == [], "the README has one script; longer text belongs in docs/ and examples/"
    assert len([line for line in script.splitlines() if line.strip()]) <= 22
    (folder / "train.py").write_text(script)
    shown = [b for b in blocks(ROOT / "README.md", "sh") if "train.py" in b]
    first, *again = ([line.partition("#")[0].strip() for line in block.splitlines()] for block in shown)
    assert all(each[: len(first)] == first for each in again)
    output = ""
    for line in first:
        program, *arguments = line.split()
        assert program == "keras-ddl"
        output += run([str(COMMAND), *arguments], folder)
    (folder / "output").write_text(output)
    return folder


def test_readme_script_trains_and_exports(readme: Path) -> None:
    assert "Epoch 5/5" in (readme / "output").read_text()
    assert (readme / "saved_model" / "1" / "saved_model.pb").exists()


@pytest.mark.long
def test_readme_script_prints_the_same_numbers_at_any_number_of_ranks(readme: Path) -> None:
    """At four digits, rounding does not show in the script's five epochs."""

    def printed(output: str) -> list[str]:
        return re.findall(r"accuracy: \S+ - loss: \S+ - val_accuracy: \S+ - val_loss: [\d.]+", output)

    expected = printed((readme / "output").read_text())
    assert len(expected) == 5
    for number in (1, 3):
        output = run([str(COMMAND), "run", "-np", str(number), "python", "train.py"], readme)
        assert printed(output) == expected


def test_serving_page_queries_the_readme_model(
    readme: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the page's commands unchanged except for ports, and compares the message for a wrong shape."""
    page = ROOT / "serving" / "docs" / "serving.md"
    text = page.read_text(encoding="utf-8").split("## Query it")[1].split("### Images")[0]
    (readme / "rows.py").write_text(blocks(page, "python")[0])
    client = re.search(r"^    import grpc, numpy.*?(?=^\S)", text, re.MULTILINE | re.DOTALL)
    wrong, refusal = re.search(r"^    (curl .*)\n    (\{.*)$", text, re.MULTILINE).groups()
    monkeypatch.setenv("PATH", f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}")
    with serving(readme / "saved_model") as server:
        server.wait_for(1)

        def here(line: str) -> str:
            return line.replace("localhost:8500", f"localhost:{server.grpc_port}").replace(
                "localhost:8501", f"localhost:{server.rest_port}"
            )

        outputs = [run([sys.executable, "rows.py"], readme)]
        for line in [*"".join(blocks(page, "sh")).splitlines(), wrong]:
            outputs.append(run(["sh", "-c", here(line).replace("curl ", "curl -sS ")], readme))
        monkeypatch.chdir(readme)
        exec(compile(here(textwrap.dedent(client[0])), "client.py", "exec"), {})
    outputs.append(capsys.readouterr().out)
    _, by_command, from_json, by_rest, status, metadata, refused, by_grpc = outputs
    expected = np.array(json.loads(by_rest[by_rest.index("{") :])["predictions"])
    assert expected.shape == (2, 10)
    assert list(expected.argmax(1)) == [0, 1]  # the first two digits
    assert json.loads(status)["model_version_status"][0]["state"] == "AVAILABLE"
    assert "serving_default" in json.loads(metadata)["metadata"]["signature_def"]["signature_def"]
    assert refused == refusal
    for shown in (by_command, from_json, by_grpc):
        numbers = re.findall(r"[\d.]+(?:e-?\d+)?", shown[shown.index("[[") :])
        np.testing.assert_allclose(np.array(numbers, float), expected.ravel(), atol=1e-5)


def launches() -> list[Any]:
    """Returns every page with Python, on one rank and on two; `make test` runs one of the two."""
    parameters = []
    for page in PAGES:
        for size in (1, 2):
            if blocks(page, "python") and not (size == 2 and page.stem in ONE_PROCESS):
                quick = size == (2 if page.stem in ABOUT_RANKS else 1)
                name = str(page.relative_to(ROOT).with_suffix("")) + f"-np{size}"
                parameters.append(pytest.param(page, size, marks=[] if quick else pytest.mark.long, id=name))
    return parameters


def run_page(page: Path, folder: Path, size: int) -> None:
    """Runs a page's blocks as one script, on `size` ranks, or for 1 in a process without a launcher."""
    (folder / "page.py").write_text("\n\n".join(blocks(page, "python")))
    (sockets := folder / "sockets").mkdir(mode=0o700)
    ranks = []
    for rank in range(size):
        environment = rank_environment(rank, size, sockets) if size > 1 else {}
        if page.stem == "from-ddl":
            environment["DDL_OPTIONS"] = "-mode p"  # as ddlrun does
        (folder / f"run{rank}.py").write_text(RUN.format(folder=str(folder), rank=rank, environment=environment))
        ranks.append(FRESH.Process(target=runpy.run_path, args=(str(folder / f"run{rank}.py"),)))
        ranks[-1].start()
    for each in ranks:
        each.join(300)
    for each in ranks:
        each.kill()
    outputs = [(folder / f"output.{rank}").read_text()[-6000:] for rank in range(size)]
    assert [each.exitcode for each in ranks] == [0] * size, "\n".join(outputs)


@pytest.mark.parametrize(("page", "size"), launches())
def test_docs_python_blocks_run(page: Path, size: int, tmp_path: Path) -> None:
    run_page(page, tmp_path, size)


def test_docs_commands_exist() -> None:
    """Every `make` target and `keras-ddl` command on a page exists."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    known = run([str(COMMAND), "--help"], ROOT)
    for page in [ROOT / "README.md", *PAGES, *BESIDE]:
        text = page.read_text(encoding="utf-8")
        for block in blocks(page, "sh"):
            for target in re.findall(r"^make ([a-z]+)", block, re.MULTILINE):
                assert target in targets, f"{page.name}: make {target}"
        for name in re.findall(r"keras-ddl ([a-z]+)\b", text):
            assert re.search(rf"^\s+{name}\b", known, re.MULTILINE), f"{page.name}: keras-ddl {name}"
