"""keras-ddl run --config and --dry-run: job files, how the command line overrides them, and the shown commands."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from harness.needed_parts import needs_part
from keras_ddl.cli.run import command
from keras_ddl.errors import ConfigError
from keras_ddl.launch.mpi import mpirun

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (*mpirun.ALLOCATIONS, "SLURM_NTASKS", "KERAS_DDL_MPIRUN", "A"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").touch()
    return tmp_path


def dry_run(*arguments: str, file: str | None = None) -> tuple[str, str]:
    """Returns the comments, and the command line that would start the ranks."""
    words = ["--dry-run", *arguments]
    if file is not None:
        Path("job.toml").write_text(file)
        words = ["--config", "job.toml", *words]
    done = CliRunner().invoke(command, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    *comments, line = done.output.splitlines()
    assert all(comment.startswith("# ") for comment in comments)
    return "\n".join(comment[2:] for comment in comments), line


FILE = """
np = 3
restarts = 2
timeout = 90
mpi-arg = ["--mca a b", "-v"]
mpirun = "mpirun"
command = ["python", "train.py", "--name", "two words"]

[env]
A = "1"
B = "x=y"
"""


def test_file_replaces_the_command_line() -> None:
    words = ["-np", "3", "--restarts", "2", "--timeout", "90", "--mpi-arg", "--mca a b", "--mpi-arg", "-v"]
    words += ["--mpirun", "mpirun", "-x", "A=1", "-x", "B=x=y"]
    assert dry_run(file=FILE) == dry_run(*words, "--", "python", "train.py", "--name", "two words")
    comments, line = dry_run(file=FILE)
    assert "-np 3 " in line and "--mca a b -v " in line and line.endswith("train.py --name 'two words'")
    assert "  A=1\n  B=x=y\n" in comments
    assert "started again, up to 2 times" in comments and "ends after 90 s" in comments


def test_command_line_overrides_the_file() -> None:
    words = ["-np", "5", "--restarts", "0", "--mpi-arg", "-q", "-x", "A=2", "-x", "C=3", "--", "python", "train.py"]
    comments, line = dry_run(*words, file=FILE)
    assert "-np 5 " in line and " -q " in line and "--mca" not in line and line.endswith("/python train.py")
    assert "  A=2\n  B=x=y\n  C=3\n" in comments and "started again" not in comments


def test_hosts_on_the_command_line_replace_those_in_the_file(folder: Path) -> None:
    (folder / "hosts").write_text("h8:2\n")
    file = 'hosts = "h0:1,h1:1"\nhostfile = "hosts"\ncommand = "train.py"\n'
    with pytest.raises(ConfigError, match="Hosts must be named once"):
        dry_run(file=file)
    assert "--host h7:4 " in dry_run("--hosts", "h7:4", file=file)[1]
    assert "--host h8:2 " in dry_run("--hostfile", "hosts", file=file)[1]
    assert "--host h0:1,h1:1 " in dry_run(file=file.replace("hostfile", "#"))[1]


def test_secrets_are_not_shown() -> None:
    words = ["--password=p1", "-x", "API_TOKEN=p2", "sh -c 'export SECRET_ID=\"p3 p3\"'", "--lr=0.1"]
    words += ["--api-key", "p7", "sh -c 'train --token p8 p8'", "--key", "--lr", "shown"]
    mpi = ["-np", "2", "--mpirun", "mpirun", "--mpi-arg", "-x PASSWORD=p4", "-x", "MY_KEY=p5"]
    comments, line = dry_run(*mpi, "--", "python", "train.py", *words)
    assert not re.search(r"p\d", comments + line), comments + line
    for text in (comments.partition("\n")[0], line):
        assert "'--password=***' -x 'API_TOKEN=***'" in text and text.endswith("--key --lr shown")
        assert "--lr=0.1 --api-key '***' 'sh" in text
    Path("hosts.sh").write_text("#!/bin/sh\necho localhost:1\n")
    Path("hosts.sh").chmod(0o755)
    for option in ("--token=p6", "--token p6"):
        assert "p6" not in dry_run("--host-discovery-script", f"./hosts.sh {option}", "--", "train.py")[0]
    assert "-x 'PASSWORD=***'" in line and "\n  MY_KEY=***" in comments


@needs_part("--metrics-address")
def test_metrics_address_needs_a_port() -> None:
    message = "--metrics-address needs --metrics-port. Received: --metrics-address 0.0.0.0"
    with pytest.raises(ConfigError, match=re.escape(message)):
        dry_run("--metrics-address", "0.0.0.0", "train.py")
    with pytest.raises(ConfigError, match=re.escape(message)):
        dry_run("train.py", file='metrics-address = "0.0.0.0"')
    dry_run("--metrics-address", "0.0.0.0", "--metrics-port", "0", "-np", "2", "train.py")


def test_program_may_be_one_string() -> None:
    assert dry_run(file="np = 2\ncommand = \"train.py --name 'two words'\"")[1].endswith("train.py --name 'two words'")


MISTAKES = {
    "no TOML": ("np: 2", "must be a file in TOML. Received: job.toml"),
    "unknown": ("restart = 2", "Received: 'restart' in job.toml. The nearest is 'restarts'"),
    "underscore": ("output_dir = 'a'", "Received: 'output_dir' in job.toml. The nearest is 'output-dir'"),
    "of a table": ("[run]\nnp = 2", "Received: 'run' in job.toml"),
    "another file": ("config = 'a'", "Received: 'config' in job.toml"),
    "twice": ("np = 1\nnum-proc = 1", "Received: 'np' and 'num-proc' in job.toml, which are the same option"),
    "string for a number": (
        "restarts = '2'",
        "restarts must be a whole number. Received: restarts = '2' (str) in job.toml. Write restarts = 2.",
    ),
    "bool for a number": (
        "np = true",
        "np must be a whole number, or a range such as '2:4'. Received: np = True (bool)",
    ),
    "string for a flag": ("verbose = 'yes'", "verbose must be true or false. Received: verbose = 'yes' (str)"),
    "number for a string": ("hosts = 2", "hosts must be a string. Received: hosts = 2 (int)"),
    "list with a number": ("mpi-arg = ['a', 2]", "mpi-arg must be a string, or a list of these. Received: mpi-arg = 2"),
    "out of range": (
        "np = 0",
        "np must be a value that `keras-ddl run --help-all` allows. Received: np = 0 in job.toml: 0 is neither",
    ),
    "no such file": ("hostfile = 'none'", "Received: hostfile = 'none' in job.toml"),
    "program": ("command = 2", "command must be a string, or a list of strings. Received: command = 2"),
    "quotes": (
        'command = "python \'x"',
        'must be a command line in shell syntax. Received: command = "python \'x" in job.toml, No closing quotation',
    ),
    "variables": ("env = 2", "env must be a table. Received: env = 2"),
    "variable": ("[env]\nA = 1", 'Received: A = 1 in [env] of job.toml. Write A = "1"'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_a_file_is_named(name: str) -> None:
    text, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        dry_run("--", "train.py", file=text)


def test_file_takes_every_option_of_run_by_its_long_name() -> None:
    options = [each for each in command.params if isinstance(each, click.Option) and each.name not in ("env", "config")]
    for option in options:
        for word in (word for word in option.opts if word.startswith("--")):
            is_number = "integer" in option.type.name or option.type.name in ("float", "ranks")
            value = (
                "false"
                if option.is_flag
                else "1"
                if is_number
                else '"."'
                if option.name == "output_dir"
                else '"train.py"'
            )
            with pytest.raises(ConfigError, match="Received: 'restart' in"):  # the keys before it are accepted
                dry_run(file=f"{word[2:]} = {value}\nrestart = 1")


@needs_part("--events")
def test_example_on_the_page_is_valid(folder: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "launch.md").read_text(), re.MULTILINE | re.DOTALL)
    assert tomllib.loads(text)["command"][1] == "train.py"
    comments, line = dry_run(file=text)
    assert line.endswith("train.py --epochs 20") and "  WANDB_API_KEY=***" not in comments


# ---- --dry-run -------------------------------------------------------------------------------------------------------


def test_dry_run_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "secret of the shell")
    words = ["-np", "2:3", "--spares", "1", "-x", "HERE", "-x", "MY_API_KEY=k", "-x", "T=a b"]
    comments, line = dry_run(*words, "--output-dir", "logs", "train.py", "x")
    assert f"program: {sys.executable} train.py x\n" in comments
    assert "  this host: ranks 0 to 2; spare 3\n" in comments
    assert "ranks started by: host_ranks, without MPI\n" in comments
    assert "  MY_API_KEY=***\n" in comments and "  T='a b'\n" in comments and "=k" not in comments
    assert (
        "when a rank is lost: the other ranks continue; at least 2 are needed" in comments
        and "output of each rank: logs" in comments
    )
    assert shlex.split(line)[1:] == [
        *("-P", "-m", "keras_ddl.launch.starters.host_ranks", "-np", "3", "--spares", "1"),
        *("--", sys.executable, "train.py", "x"),
    ]


def test_dry_run_on_several_hosts_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_DDL_SSH", "ssh -q")
    words = ["--hosts", "localhost:1,h1:2,h2:4", "-np", "1:4", "--spares", "1"]
    comments, line = dry_run(*words, "train.py")
    assert "  localhost: rank 0\n  h1: ranks 1 to 2\n  h2: rank 3; spare 4\n" in comments
    *_, here, one, two = comments.splitlines()
    assert here == f"  {sys.executable} -P -m keras_ddl.launch.starters.host_ranks --from-stdin"
    assert one.startswith("  ssh -q h1 'env ") and one.endswith(f"{here.strip()}'") and two.startswith("  ssh -q h2 ")
    assert "keras_ddl.launch.starters.remote_ranks --hosts localhost:1,h1:2,h2:4 -np 4 --spares 1 -- " in line


def test_dry_run_with_mpirun_and_in_a_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    comments, line = dry_run("--hosts", "h0:2,h1:2", "train.py")
    assert "  h0: ranks 0 to 1\n  h1: ranks 2 to 3\n" in comments and "mpirun (" in comments
    assert line.startswith(mpirun.find().path) and "cores: no rank is bound to cores\n" in comments
    assert "as the arguments for mpirun say" in dry_run("-np", "2", "--mpi-arg", "--bind-to core", "train.py")[0]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    comments, _ = dry_run("train.py")
    assert "  chosen by the resource manager (SLURM_JOB_NODELIST=n[1-2]): ranks 0 to 1\n" in comments


@needs_part("--events")
def test_dry_run_starts_nothing(folder: Path) -> None:
    words = ["-np", "2", "--events", "events", "--metrics-port", "1", "--output-dir", "logs"]
    comments, _ = dry_run(*words, "-x", "A=a\nb", "--", "touch", "made it")
    assert "  A='a\\nb'\n" in comments
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]
