"""A process of a peer: runs programs one after the other, and writes the outcome of each to a file."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import pickle
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

from _scoreboard.judge import Outcome
from _scoreboard.peers import EVERY, Peer

IGNORED = ("made outside the scope", "retracing")  # warnings that say nothing about values


def work(name: str, process: int, folder: Path, programs: list[str], limit: float) -> None:
    """Runs the programs under the peer; writes `PROGRAM.PROCESS.begun` before each and `PROGRAM.PROCESS` after it.

    A program may take `limit` seconds. Shortly before that, this writes the program's stack to stderr.
    """
    peer = EVERY[name](process)
    import keras

    from _scoreboard.programs import PROGRAMS

    if peer.process == 0:
        (folder / "versions").write_text(json.dumps(versions()))
    for each in programs:
        (folder / f"{each}.{peer.process}.begun").touch()
        faulthandler.dump_traceback_later(0.9 * limit)
        outcome = outcome_of(PROGRAMS[each], peer)
        faulthandler.cancel_dump_traceback_later()
        temporary = folder / f"{each}.{peer.process}.temporary"
        temporary.write_bytes(pickle.dumps(outcome))
        temporary.rename(folder / f"{each}.{peer.process}")
        keras.backend.clear_session()
        gc.collect()


def outcome_of(program: object, peer: Peer) -> Outcome:
    """Runs a program in float64 with fixed seeds, and records its warnings."""
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(7)
    warned: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(each) for each in ("tensorflow", "absl")]
    for logger in loggers:
        logger.addHandler(listener)
    outcome, began = Outcome(), time.perf_counter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            peer.begin()
            outcome.values = program.run(peer)
        except Exception as error:
            traceback.print_exc()
            outcome.error = f"{type(error).__name__}: {first_line(str(error))}"
    for logger in loggers:
        logger.removeHandler(listener)
    warned += [str(each.message) for each in seen if issubclass(each.category, (UserWarning, RuntimeWarning))]
    outcome.warned = [line.strip().splitlines()[0] for line in warned if not any(part in line for part in IGNORED)]
    outcome.seconds = time.perf_counter() - began
    return outcome


def first_line(message: str) -> str:
    """Returns the first informative line, without colours. Keras and TensorFlow begin with where the error was."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines() if line.strip()]
    general = (
        "Graph execution error",
        "Exception encountered when calling",
        "Detected at node",
        "File ",
        "<stack",
        "2 root",
    )
    line = next((line for line in lines if not line.startswith(general)), lines[0] if lines else "")
    return line if len(line) <= 200 else line[:200] + "..."


def versions() -> dict[str, str]:
    from importlib import metadata

    seen = {}
    for each in ("keras", "keras_ddl", "tensorflow", "tensorflow_cpu", "jax", "torch", "numpy"):
        try:
            seen[each.removesuffix("_cpu")] = metadata.version(each)
        except metadata.PackageNotFoundError:
            continue
    used = {"keras", "numpy", os.environ["KERAS_BACKEND"], "keras_ddl" if "keras_ddl" in sys.modules else ""}
    return {each: version for each, version in seen.items() if each in used}
