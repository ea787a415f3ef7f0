"""Runs inside each rank of a parallel test. Started by harness/launching.py; imports neither pytest nor keras_ddl.

Check programs may use `skip("why")`, `@long`, `rank()` and `size()` from here; the last two come from the launcher's
variables, so they are also right if keras_ddl is broken.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import pickle
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class SkipCheck(Exception):
    """Raised by `skip`; a check counts as skipped if every rank skips it."""


def skip(why: str) -> NoReturn:
    raise SkipCheck(why)


def long(check: Callable[[], None]) -> Callable[[], None]:
    """Marks a slow check, which only `make test-all` runs."""
    return check


def rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)


def size() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)


def main() -> None:
    kind, folder, program, *arguments = sys.argv[1:]
    base = Path(folder)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(base / f"{rank()}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
    faulthandler.enable()
    sys.argv = [program, *arguments]
    if kind == "script":
        sys.path.insert(0, str(Path(program).parent))  # like Python
        runpy.run_path(program, run_name="__main__")
        return
    if kind == "function":
        function, args = pickle.loads(Path(program).read_bytes())
        leave_result(base, function(*args))
    else:
        run_checks(
            base, [Path(one) for one in program.split(os.pathsep)], arguments, float(kind.removeprefix("checks:"))
        )


def leave_result(base: Path, value: Any) -> None:
    part = base / f"{rank()}.result.part"
    part.write_bytes(pickle.dumps(value))
    part.rename(base / f"{rank()}.result")


def run_checks(base: Path, programs: list[Path], names: list[str], timeout: float) -> None:
    """Runs the named functions in order, in step on all ranks; ends after the first check that any rank fails."""
    faulthandler.dump_traceback_later(timeout + 60, exit=True)
    functions: dict[str, Any] = {}
    for program in programs:
        spec = importlib.util.spec_from_file_location(program.stem, program)
        module = importlib.util.module_from_spec(spec)
        sys.modules[program.stem] = module
        spec.loader.exec_module(module)
        functions.update(vars(module))
    if "tensorflow" in sys.modules:
        _leave_datasets_untuned()
    if "keras" in sys.modules and "SOFTWARE_GPU_DEVICES" in os.environ:
        _leave_keras_without_xla()
    gc.freeze()  # otherwise every full collection visits all objects of TensorFlow again
    gc.set_threshold(20_000)  # traces make thousands of objects that live as long as their graph
    for name in names:
        faulthandler.dump_traceback_later(timeout, exit=True)
        start = time.monotonic()
        outcome, text = _run_check(functions[name])
        _leave_outcome(base, name, outcome, text, time.monotonic() - start)
        # Longer than the other ranks' limit: a hanging rank is stopped and shows its stacks before this one ends.
        faulthandler.dump_traceback_later(timeout + 90, exit=True)
        others = _all_outcomes(base, name, time.monotonic() + timeout + 60)
        if "failed" in others:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # ranks may differ now; the harness starts new ones for the other checks
    faulthandler.dump_traceback_later(timeout, exit=True)  # the exit may hang, too


def _leave_datasets_untuned() -> None:
    """Turns off the tuner of tf.data. Deleting a tuned iterator may wait up to a minute for the tuner, which can miss
    its end if all cores are busy, as they are here.
    """
    from tensorflow.data import Options
    from tensorflow.python.data.ops.dataset_ops import DatasetV2

    original = DatasetV2._apply_debug_options  # called for every new iterator

    def untuned(dataset):
        options = Options()
        options.autotune.enabled = False
        return original(dataset.with_options(options))

    DatasetV2._apply_debug_options = untuned


def _leave_keras_without_xla() -> None:
    """Keeps Keras from compiling one-process models with XLA, as it does if TensorFlow sees a GPU: XLA has no compiler
    for software GPUs, and it draws other random numbers on the CPU.
    """
    from keras.src.trainers import trainer

    trainer.model_supports_jit = lambda model: False


def _run_check(function: Any) -> tuple[str, str]:
    try:
        function()
    except SkipCheck as why:
        return "skipped", str(why)
    except BaseException:  # KeyboardInterrupt and SystemExit also fail a check
        return "failed", traceback.format_exc()
    return "passed", ""


def _leave_outcome(base: Path, name: str, outcome: str, text: str, seconds: float) -> None:
    part = base / f"{name}.{rank()}.part"
    part.write_text(json.dumps([outcome, text, seconds]))
    part.rename(base / f"{name}.{rank()}.json")


def _all_outcomes(base: Path, name: str, deadline: float) -> list[str]:
    """Waits for every rank's outcome of `name`. This barrier uses files, so it works whatever is broken."""
    outcomes = []
    for other in range(size()):
        path = base / f"{name}.{other}.json"
        while not path.exists():
            if time.monotonic() > deadline:
                return ["failed"]
            time.sleep(0.002)
        outcomes.append(json.loads(path.read_text())[0])
    return outcomes
