"""The program that `keras_ddl.run` starts on every rank: reads a function call, runs it and writes its result.

    python -m keras_ddl.launch.worker

The launcher sends the call and gets the result over the rank's connection.
"""

from __future__ import annotations

import linecache
import pickle
import sys
from pathlib import Path
from typing import Any

from keras_ddl import config
from keras_ddl.communicator import by_value
from keras_ddl.communicator.reporting.error_report import for_program
from keras_ddl.errors import LaunchError
from keras_ddl.link import program
from keras_ddl.link.kinds import FROM_PROGRAM, Kind
from keras_ddl.link.program import ProgramLink


def main() -> None:
    """Runs the call. An exception is sent to the caller and then ends this program as usual."""
    rank = int(Path(config.get("RUN_DIR")).name.removeprefix("rank-"))
    link = program.opened()
    call = pickle.loads(link.call())
    # Lets this process find the modules that a notebook imports.
    sys.path[:] = call["sys_path"]
    sys.argv[:] = [""]
    # The source of a notebook's cells, for tracebacks. An entry without a time never counts as outdated in linecache.
    for name, lines in call["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    try:
        function, args, kwargs = _load(call["function"], rank)
        result = {"value": _pickled_value(function(*args, **kwargs), rank)}
    except BaseException as error:
        # This file's frame does not help the caller.
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        text = for_program(error)
        pickled = None if text.is_within else _pickled_error(error)  # else the caller gets TensorFlow's error
        _send_result(link, {"error": pickled, "traceback": text.traceback})
        raise
    _send_result(link, result)


def _load(payload: bytes, rank: int) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as error:
        raise LaunchError(
            f"Everything that fn uses must be importable on the ranks. Received: rank {rank} could not unpickle the "
            f"call: {type(error).__name__}: {error}. Import it inside fn, or put its module where python finds it."
        ) from error


def _pickled_value(value: Any, rank: int) -> bytes:
    try:
        return by_value.dumps(value)
    except Exception as error:
        raise LaunchError(
            f"The result of fn must be picklable. Received: {type(value).__name__} on rank {rank}: "
            f"{type(error).__name__}: {error}. Return plain values: numbers, NumPy arrays, history.history, weights."
        ) from error


def _pickled_error(error: BaseException) -> bytes | None:
    """Returns the pickled exception, or None if it cannot be pickled and unpickled."""
    try:
        data = by_value.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _send_result(link: ProgramLink, result: dict[str, Any]) -> None:
    data, chunk_bytes = pickle.dumps(result), FROM_PROGRAM[Kind.RESULT]
    for begin in range(0, len(data), chunk_bytes):
        link.send(Kind.RESULT, data[begin : begin + chunk_bytes])


if __name__ == "__main__":
    # Imported by its own name, because __main__ in the pickled call is the caller's module.
    from keras_ddl.launch import worker

    worker.main()
