"""A rank's startup before its program: garbage collection is off during large imports, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from keras_ddl.launch.rank import rank_environment

START = Path(rank_environment.__file__).parent / "rank_start"
PROGRAM = """
import gc, importlib.util, os, sys
assert gc.isenabled()
assert importlib.util.find_spec("keras")
import keras, other
assert gc.isenabled()
print(keras.enabled, other.enabled, gc.get_freeze_count(), "exec_module" in vars(keras.__loader__))
print([p for p in sys.path if p.endswith("launch/rank/rank_start")], os.environ.get("PYTHONPATH"), sys.before)
"""


def test_rank_start_imports_large_packages_without_garbage_collection(tmp_path: Path) -> None:
    for name in ("keras", "other"):
        (tmp_path / f"{name}.py").write_text("import gc\nenabled = gc.isenabled()")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.before = 'of the program'")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    rank_environment.prepare_start(environment, is_spare=False)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False True 0 False", f"[] {tmp_path} of the program"]


def test_prepare_start_makes_a_spare_wait_first() -> None:
    environment = {"PYTHONPATH": "/of/the/program"}
    rank_environment.prepare_start(environment, is_spare=True)
    assert environment["PYTHONPATH"].split(":") == [str(START.with_name("spare_start")), str(START), "/of/the/program"]
