"""Shell completion, set up as in docs/install.md. The scripts for zsh and fish are click's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from keras_ddl import parts
from keras_ddl.cli.main import group


def completions(*words: str) -> set[str]:
    """Returns the completions of the last of `words`."""
    completion = BashComplete(group, {}, "keras-ddl", "_KERAS_DDL_COMPLETE")
    return {each.value for each in completion.get_completions(list(words[:-1]), words[-1])}


def test_commands_and_options_are_completed() -> None:
    assert completions("") == {"run", "info", *(name for part in parts.installed() for name in part.commands)}
    assert completions("inf") == {"info"}
    assert {"--hosts", "--hostfile"} <= completions("run", "--host")
    assert completions("run", "-np", "2", "python", "tr") == {"tr"}, "the shell completes it as a file"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_the_command() -> None:
    program = """
set -e
eval "$(_KERAS_DDL_COMPLETE=bash_source keras-ddl)"
complete -p keras-ddl
COMP_WORDS=(keras-ddl run --hostf) COMP_CWORD=2
_keras_ddl_completion keras-ddl --hostf run
echo "${COMPREPLY[@]}"
"""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True, check=True)
    registered, completed = done.stdout.splitlines()
    assert registered.endswith("keras-ddl") and completed == "--hostfile"
