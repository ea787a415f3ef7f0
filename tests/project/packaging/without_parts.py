"""Imports and uses everything in installations that each lack one part. Run by test_parts.py.

    without_parts.py FOLDER    # which contains the unpacked wheel; prints {part: {what: text}} as JSON

TensorFlow is imported once; each installation is tried in a process forked after that.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import sys
import traceback
from pathlib import Path

import keras  # noqa: F401
import numpy  # noqa: F401
import tensorflow as tf  # noqa: F401

FOREIGN = ("keras_tuner", "horovod")  # may not be installed


def finds_keras_ddl(finder: object) -> bool:
    """Returns whether a finder belongs to an editable installation, or to keras_ddl itself."""
    home = getattr(finder, "__module__", "")
    return home.startswith("_editable_") or home == "keras_ddl"


def without(part: str, wheel: Path, folder: Path) -> Path:
    """Returns a folder with links to all of the wheel except a part."""
    (folder / "keras_ddl").mkdir(parents=True)
    for entry in (wheel / "keras_ddl").iterdir():
        if entry.name != part:
            (folder / "keras_ddl" / entry.name).symlink_to(entry)
    return folder


def said(arguments: list[str]) -> str:
    """Returns the status and output of keras-ddl."""
    from keras_ddl.cli import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(arguments)
        except SystemExit as end:
            return f"{end.code} {output.getvalue()}"
    return output.getvalue()


def tried(part: str, words: list[str]) -> dict[str, str]:
    """Returns the problems and the output of the first installation in sys.path."""
    import keras_ddl

    found = {}
    for each in pkgutil.walk_packages(keras_ddl.__path__, "keras_ddl."):
        if each.name.endswith(("__main__", "sitecustomize")) or ".shim" in each.name or ".lib" in each.name:
            continue
        if each.name.startswith("keras_ddl.torch") and importlib.util.find_spec("torch") is None:
            continue
        try:
            importlib.import_module(each.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in FOREIGN:
                found[f"import {each.name}"] = traceback.format_exc()
        except Exception:
            found[f"import {each.name}"] = traceback.format_exc()
    try:
        importlib.import_module(f"keras_ddl.{part}")
    except ModuleNotFoundError as error:
        found["module"] = str(error)
    try:
        getattr(keras_ddl, part)
    except AttributeError as error:
        found["attribute"] = str(error)
    found["help"], found["help of run"] = said(["--help"]), said(["run", "--help"])
    for word in words:
        found[word] = said(["run", word, "x", "python", "-c", ""] if word.startswith("--") else [word])
    return found


def main(folder: Path) -> None:
    from keras_ddl import parts

    results = {}
    words = {name: list(parts.words_of(name)) for name in parts.FOLDERS}
    home = Path(parts.__file__).parents[1]
    for part in parts.FOLDERS:
        reader, writer = os.pipe()
        if os.fork() == 0:
            for name in [each for each in sys.modules if each.partition(".")[0] == "keras_ddl"]:
                del sys.modules[name]
            sys.meta_path[:] = [each for each in sys.meta_path if not finds_keras_ddl(each)]
            sys.path[:] = [str(without(part, folder, folder / f"without-{part}"))] + [
                each for each in sys.path if Path(each or ".").resolve() != home
            ]
            with os.fdopen(writer, "w") as pipe:
                pipe.write(json.dumps(tried(part, words[part])))
                pipe.flush()
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            results[part] = json.loads(pipe.read() or "{}")
        os.wait()
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
