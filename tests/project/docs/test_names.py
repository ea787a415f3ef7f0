"""Every `keras_ddl.x.y` in a page, docstring or message exists after a plain `import keras_ddl`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from harness.pages import BESIDE, PAGES, READMES
from harness.source_modules import MODULES
from keras_ddl import parts

ROOT = Path(__file__).resolve().parents[3]
NAME = re.compile(r"(?<![\w./-])(keras_ddl(?>(?:\.[A-Za-z_]\w*)+))(?!\w|/)")
# Names in import statements, of programs or for Sphinx, whose strict build checks them.
IMPORTED = re.compile(r"(?:\bimport|\bfrom|-m|automodule::|click::) $")
# Importing `ddl` makes every optimizer average gradients, and `torch` needs PyTorch, so only a statement imports them.
BY_IMPORT_ONLY = ("keras_ddl.ddl", "keras_ddl.torch")
# Each name has its own process, because one import could make another name exist. TensorFlow is imported once.
RESOLVE = """
import functools, os, sys
import keras, tensorflow
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        import keras_ddl
        try:
            functools.reduce(getattr, name.split(".")[1:], keras_ddl)
        except AttributeError as error:
            print(name, "->", error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def strings(path: Path) -> list[str]:
    """Returns the docstrings and messages of a program, without module names that it imports or starts."""
    constants = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Constant)]
    texts = [node.value for node in constants if isinstance(node.value, str)]
    return [text for text in texts if not NAME.fullmatch(text)]


def by_import_only(written: str) -> bool:
    """Returns whether the name is in a part that is no attribute of keras_ddl, or is a placeholder."""
    name = written.split(".")[1]
    return written.endswith(".NAME") or (name in parts.FOLDERS and name not in parts.public())


def written_names() -> set[str]:
    texts = [page.read_text(encoding="utf-8") for page in [ROOT / "CHANGELOG.md", *PAGES, *READMES, *BESIDE]]
    texts += [text for path in MODULES.values() for text in strings(path)]
    return {
        match[1]
        for text in texts
        for match in NAME.finditer(text)
        if not IMPORTED.search(text[: match.start()])
        and not match[1].startswith(BY_IMPORT_ONLY)
        and not by_import_only(match[1])
    }


def test_every_written_name_exists_after_a_plain_import() -> None:
    names = sorted(written_names())
    assert len(names) > 50
    assert {"keras_ddl.model_state.trackable", "keras_ddl.communicator.describe"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *names], stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    assert done.stdout.splitlines() == []


def test_public_modules_exist_after_a_plain_import() -> None:
    """Public modules beside the folders, which users import by name."""
    modules = sorted(
        path.stem for path in (ROOT / "keras_ddl").glob("*.py") if path.stem not in ("__init__", "config", "parts")
    )
    code = "import sys, keras_ddl\nfor name in sys.argv[1:]: getattr(keras_ddl, name)"
    subprocess.run([sys.executable, "-c", code, *modules], check=True, timeout=600)
