"""Completion in a shell, as docs/install.md has it set up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from keras_ddl.cli.main import group

COMMAND = Path(sys.executable).with_name("keras-ddl")


def proposed(*words: str) -> set[str]:
    """Returns what completes the last of `words`."""
    completion = BashComplete(group, {}, "keras-ddl", "_KERAS_DDL_COMPLETE")
    return {each.value for each in completion.get_completions(list(words[:-1]), words[-1])}


def test_commands_and_options_are_proposed() -> None:
    assert proposed("") >= {"run", "export", "serve", "predict", "bench", "trace", "doctor", "info"}
    assert proposed("ser") == {"serve"}
    assert {"--hosts", "--hostfile"} <= proposed("run", "--host")
    assert proposed("export", "--format", "t") == {"tflite"}
    assert proposed("run", "-np", "2", "python", "tr") == {"tr"}, "the shell completes it as a file"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_the_command(tmp_path: Path) -> None:
    program = """
set -e
eval "$(_KERAS_DDL_COMPLETE=bash_source keras-ddl)"
complete -p keras-ddl
COMP_WORDS=(keras-ddl run --hostf) COMP_CWORD=2
_keras_ddl_completion keras-ddl --hostf run
echo "${COMPREPLY[@]}"
"""
    registered, completed = lines_of(["bash", "-c", program], tmp_path)
    assert registered.endswith("keras-ddl")
    assert completed == "--hostfile"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_the_command(tmp_path: Path) -> None:
    """`compinit` and what it defines need a terminal: functions stand in for them."""
    program = """
set -e
compdef() { print registered $2 }
_describe() { print -rl -- $completions_with_descriptions }
eval "$(_KERAS_DDL_COMPLETE=zsh_source keras-ddl)"
words=(keras-ddl run --hostf) CURRENT=3
_keras_ddl_completion
"""
    registered, completed = lines_of(["zsh", "-fc", program], tmp_path)
    assert registered == "registered keras-ddl"
    assert completed.startswith("--hostfile:")


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_the_command(tmp_path: Path) -> None:
    file = tmp_path / "fish" / "completions" / "keras-ddl.fish"
    file.parent.mkdir(parents=True)
    file.write_text("_KERAS_DDL_COMPLETE=fish_source keras-ddl | source\n")
    (tmp_path / "train.py").touch()
    program = "complete -C 'keras-ddl run --hostf'; complete -C 'keras-ddl run -np 2 python tr'"
    option, program_file = lines_of(["fish", "-c", program], tmp_path)
    assert option.partition("\t")[0] == "--hostfile"
    assert program_file == "train.py"


def lines_of(command: list[str], directory: Path) -> list[str]:
    """Returns the lines that a shell prints, which has keras-ddl in its PATH."""
    path = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(directory), "XDG_CONFIG_HOME": str(directory)}
    done = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
