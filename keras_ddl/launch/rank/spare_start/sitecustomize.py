"""Runs before the program of a spare: imports the program's large packages early, and waits until a rank is lost."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def _without(paths: list[str]) -> list[str]:
    return [path for path in paths if os.path.abspath(path or ".") != _here]  # noqa: PTH100


# The program and its child processes should not find this module.
sys.path[:] = _without(sys.path)
os.environ["PYTHONPATH"] = os.pathsep.join(_without(os.environ.get("PYTHONPATH", "").split(os.pathsep)))
# The sitecustomize that would have run without this one.
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

from keras_ddl.launch.rank import spare  # noqa: E402

spare.wait_until_needed()
