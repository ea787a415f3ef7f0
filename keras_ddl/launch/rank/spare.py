"""Prepares the program of a spare: imports the modules that the program will need, and waits until a rank is lost.

Importing TensorFlow and Keras takes seconds, and the other ranks would have to wait for it. The script itself does not
run until the spare is needed, so that it does not write files or use memory in vain.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_ddl.communicator.transports import membership


def wait_until_needed() -> None:
    """Imports ahead, and returns when the launcher needs this spare."""
    # Newcomers join in fit under a Strategy, so the program will need these modules.
    for name in (*imports_of_script(sys.orig_argv), "keras_ddl.strategy"):
        with contextlib.suppress(Exception):  # the script will raise the same error
            importlib.import_module(name)
    membership.start()


def imports_of_script(command: Sequence[str]) -> list[str]:
    """Returns the installed modules that the script in a command line of Python imports first, in their order.

    Modules of the script's own directory are left out, because their import may do anything.
    """
    script = next((word for word in command[1:] if word.endswith(".py")), "")
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return [name for name in names if _is_installed(name.partition(".")[0])]


def _is_installed(name: str) -> bool:
    if name in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and "site-packages" in Path(spec.origin).parts
