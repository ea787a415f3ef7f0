"""Runs before a verified program, and starts recording its training without changing the program."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def _without(paths: list[str]) -> list[str]:
    return [path for path in paths if os.path.abspath(path or ".") != _here]  # noqa: PTH100


# Hides this module from the program and its child processes.
sys.path[:] = _without(sys.path)
os.environ["PYTHONPATH"] = os.pathsep.join(_without(os.environ.get("PYTHONPATH", "").split(os.pathsep)))
# Runs the sitecustomize that this one hides.
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

from keras_ddl.verify import imports  # noqa: E402

imports.begin()
