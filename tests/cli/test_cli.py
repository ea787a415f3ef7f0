"""The command line before anything is started: help, mistakes, versions. None of it waits for TensorFlow."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launching import cpu_seconds_of_children
from keras_ddl.cli.run import parse_env, resolve_program
from keras_ddl.errors import ConfigError
from launch.launching import environment, run


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["export", "--help"], ["run", "-np", "none"]])
def test_cli_help_and_mistakes_answer_within_half_a_second(arguments, tmp_path: Path):
    seconds = []  # of a core: they wait for nothing, and what else runs here does not count
    for _ in range(3):
        began = cpu_seconds_of_children()
        done = subprocess.run(
            [sys.executable, "-m", "keras_ddl.cli", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment("-", tmp_path, None),
        )
        seconds.append(cpu_seconds_of_children() - began)
        assert done.returncode == (0 if "--help" in arguments else 2), done
        assert "Usage: keras-ddl" in done.stdout + done.stderr
    assert min(seconds) < 0.5, seconds


def test_cli_help_imports_nothing_heavy(tmp_path: Path):
    code = "import sys, keras_ddl.cli\ntry: keras_ddl.cli.main(['run', '--help'])\nexcept SystemExit: pass\n"
    code += "print({'tensorflow', 'keras', 'numpy', 'mpi4py', 'subprocess', 'asyncio'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment("-", tmp_path, None)
    )
    assert done.stdout.splitlines()[-1] == "set()", done


MISTAKES = {
    "verify no program": (["verify", "-np", "2"], "ConfigError: A program must be given"),
    "verify program's option": (["verify", "x.py", "--epochs", "3"], "keras-ddl verify -np 3 -- train.py --epochs"),
    "no program": (["run", "-np", "2"], "ConfigError: A program must be given"),
    "no np": (["run", "--", "true"], "ConfigError: np: the number of ranks must be given"),
    "np of 0": (["run", "-np", "0", "--", "true"], "0 is not in the range x>=1"),
    "unknown option": (["run", "-np", "2", "--epochs", "3", "x"], "No such option"),
    "missing script": (["run", "-np", "2", "python", "nothing.py"], "The script must exist. Received: 'nothing.py'"),
    "missing program": (["run", "-np", "2", "--", "no-such-program"], "'no-such-program', which is not in PATH"),
    "wrong mode": (["run", "-np", "4", "--mode", "x:3x1", "--", "true"], "must equal the number of ranks (4)"),
    "wrong hosts": (["run", "--hosts", "h0:x", "--", "true"], "hosts must be host:ranks"),
    "host twice": (["run", "--hosts", "h0:1,h0:1", "--", "true"], "hosts must name each host once"),
    "too many ranks": (["run", "-np", "5", "--hosts", "h0:2,h1:2", "--", "true"], "take together (4)"),
    "wrong timeout": (["run", "-np", "2", "--timeout", "-1", "--", "true"], "timeout must be a number of seconds"),
    "wrong env": (["run", "-np", "2", "--env", "=x", "--", "true"], "--env must be NAME=VALUE"),
    "unset env": (["run", "-np", "2", "--env", "NO_SUCH_VARIABLE", "--", "true"], "--env must be NAME=VALUE"),
    "unknown command": (["walk"], "No such command 'walk'"),
    "export which": (["export", ".", "out", "--which", "first"], "--which must be 'latest', 'best'"),
    "export opset": (
        ["export", ".", "out", "--opset", "15"],
        "opset must be 9 to 18, and is for ONNX. Received: 15 for saved",
    ),
    "export check of a format": (["export", "--check", ".", "--format", "onnx"], "Give CHECKPOINTS and OUTPUT"),
    "export version": (["export", ".", "out", "--version", "0"], "--version must be a whole number above 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_cli_mistake_is_one_clear_message(name: str, tmp_path: Path):
    arguments, message = MISTAKES[name]
    ended = run(arguments, tmp_path)
    assert ended.status == 2, ended
    assert message in ended.err, ended
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_cli_run_without_mpirun_names_the_remedy(tmp_path: Path):
    # A python whose environment has no mpirun: a link to ours in a folder of its own.
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    env = environment("-", tmp_path, {"PATH": "/nowhere"})
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    code = "import sysconfig; sysconfig.get_path = lambda *_: '/nowhere'; from keras_ddl.cli import main; main()"
    done = subprocess.run(
        [python, "-c", code, "run", "--hosts", "h0:2", "python", "-c", "1"], capture_output=True, text=True, env=env
    )
    assert done.returncode == 1, done
    assert "LaunchError: Ranks are started by mpirun" in done.stderr, done
    assert re.search(r"or install one: \S.* install .*openmpi", done.stderr) and "--mpirun" in done.stderr
    assert "Traceback" not in done.stderr


def test_cli_run_with_something_that_is_no_mpirun(tmp_path: Path):
    ended = run(["run", "-np", "2", "--mpirun", "/bin/true", "--", "true"], tmp_path)
    assert ended.status == 1
    assert "mpirun must be that of Open MPI, MPICH or Intel MPI. Received: /bin/true" in ended.err, ended
    ended = run(["run", "-np", "2", "--", "true"], tmp_path, env={"KERAS_DDL_MPIRUN": "/no/mpirun"})
    assert ended.status == 1
    assert "KERAS_DDL_MPIRUN must be the path of an mpirun" in ended.err, ended


def test_cli_debug_shows_the_traceback_of_an_error(tmp_path: Path):
    ended = run(["--debug", "run", "-np", "2", "--", "no-such-program"], tmp_path)
    assert ended.status == 1 and "Traceback" in ended.err and "ConfigError" in ended.err, ended
    ended = run(["run", "-np", "2", "--", "no-such-program", "--debug"], tmp_path)
    assert ended.status == 2 and "Traceback" not in ended.err, ended


def test_cli_dry_run_prints_a_command_and_starts_nothing(tmp_path: Path):
    arguments = ["run", "--dry-run", "-np", "2", "--mpi-arg", "--mca btl tcp,self", "--", "touch", "made it"]
    ended = run(arguments, tmp_path)
    assert ended.status == 0, ended
    assert "-np 2 --bind-to none" in ended.out and "--mca btl tcp,self" in ended.out, ended
    assert ended.out.endswith("rank_process -- touch 'made it'\n")
    assert not (tmp_path / "made it").exists()


@pytest.mark.parametrize("words", ["-np 3", "--np 3", "-n 3", "--num-proc 3", "-np=3", "--np=3", "-np3", "-n3", "-n=3"])
def test_cli_run_takes_the_number_of_ranks_by_any_name(words: str, tmp_path: Path):
    options = ["-x", "A=1", *words.split(), "--dry-run"]
    ended = run(["run", *options, "true", "-np7"], tmp_path)
    assert "ranks 0 to 2" in ended.out and "true -np7" in ended.out, ended  # words after the program are its own


@pytest.mark.parametrize(
    ("words", "corrected"),
    [
        ("train.py -np 2", "-np 2 train.py"),
        ("python train.py --epochs 3 -np=2 -v", "-np 2 python train.py --epochs 3 -v"),
        ("train.py -n2", "-np 2 train.py"),
        ("-- train.py 'a b' --np 2", "-np 2 train.py 'a b'"),
        ("--verbose train.py --num-proc 2", "-np 2 train.py"),
    ],
)
def test_cli_run_says_that_the_number_of_ranks_stands_after_the_program(words: str, corrected: str, tmp_path: Path):
    (tmp_path / "train.py").touch()
    ended = run(["run", *shlex.split(words)], tmp_path, env={"SLURM_NTASKS": ""})
    assert ended.status == 2 and ended.err.strip().endswith(f"Write: keras-ddl run {corrected}"), ended


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("-np 2 trian.py", "'train.py'"),
        ("-np 2 python trian.py", "'train.py'"),
        ("-np 2 train", "'train.py'"),
        ("-mp 2 train.py", "'-np'"),
        ("--restart 3 -np 2 train.py", "'--restarts'"),
    ],
)
def test_cli_run_names_what_was_meant(words: str, meant: str, tmp_path: Path):
    (tmp_path / "train.py").touch()
    ended = run(["run", *words.split()], tmp_path)
    assert ended.status != 0 and f"Did you mean {meant}?" in ended.err, ended


def test_cli_info_shows_the_installation(tmp_path: Path):
    env = {"KERAS_DDL_DEADLINE_SECONDS": "17", "KERAS_DDL_STAGING_BYTES": "none", "KERAS_DDL_DEDLINE": "1"}
    env["TF_CONFIG"] = '{"cluster": {"worker": ["h0:1", "h1:1"]}}'
    ended = run(["info"], tmp_path, env=env)
    assert ended.status == 0, ended
    lines = {line.split()[0]: line for line in ended.out.splitlines() if line.strip()}
    for name in ("keras_ddl", "python", "keras", "mpi4py", "mpirun", "CPU", "/dev/shm", "KERAS_DDL_MODE"):
        assert name in lines, ended
    assert "17.0 (environment)" in lines["KERAS_DDL_DEADLINE_SECONDS"]
    assert "INVALID" in lines["KERAS_DDL_STAGING_BYTES"]
    assert "UNKNOWN" in lines["KERAS_DDL_DEDLINE"]
    assert "keras-ddl run --tf-config" in lines["TF_CONFIG"]
    assert "600.0" not in ended.out
    assert "Set by" not in ended.out, ended  # what keras_ddl passes to its own processes is no setting
    as_rank = run(["info"], tmp_path, env={"KERAS_DDL_HOST_RANK": "1/2@/tmp", "KERAS_DDL_RESTART": "1"}).out
    settings, _, handed_over = as_rank.partition("Set by keras-ddl for this process\n")
    assert "KERAS_DDL_HOST_RANK" not in settings and "KERAS_DDL_MODE" in settings, as_rank
    assert {line.split()[0] for line in handed_over.splitlines()} == {"KERAS_DDL_HOST_RANK", "KERAS_DDL_RESTART"}


def test_cli_export_of_a_missing_directory_is_one_clear_message(tmp_path: Path):
    before = cpu_seconds_of_children()
    ended = run(["export", "no-checkpoints", "out"], tmp_path)
    assert ended.status == 1, ended
    assert ended.err.startswith("keras-ddl: CheckpointError: CHECKPOINTS must be a directory"), ended
    assert cpu_seconds_of_children() - before < 10


def test_resolve_program_takes_our_python(tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()
    ours = [sys.executable, str(script), "--epochs", "3"]
    assert resolve_program((str(script), "--epochs", "3"), local=True) == ours
    assert resolve_program(("python", str(script), "--epochs", "3"), local=True) == ours
    assert resolve_program(("/bin/true", "x.py"), local=True) == ["/bin/true", "x.py"]
    # On other hosts there may be what is not here.
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
