"""The proof of an export: the SavedModel answers the stored sample as the trained model did, in a clean process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export import _replay

TOLERANCE = 1e-4  # float32: the order of sums follows the kind of CPU or GPU, the build and the number of threads
HALF_TOLERANCE = 2e-2  # float16 and bfloat16 inside: a kernel may or may not round between two steps
_SECONDS = 600.0


class CleanProcess:
    """A process without Keras and keras_ddl that replays one request. Use it in `with`: it ends with the block."""

    def __enter__(self) -> CleanProcess:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KERAS_DDL_")}
        # -P: the folder of _replay.py holds modules whose names could hide others (signatures, validate, ...).
        self._process = subprocess.Popen(
            [sys.executable, "-P", _replay.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def replay(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends the request (arguments of _replay.replay) and returns the answer."""
        try:
            output, errors = self._process.communicate(json.dumps(request) + "\n", timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ExportError(
                f"The clean process answers the sample within {_SECONDS:.0f} s. Received: nothing for "
                f"{request['path']}. Try validate='here', or a smaller sample."
            ) from error
        for line in output.splitlines():
            if line.startswith(_replay.MARK):
                return json.loads(line.removeprefix(_replay.MARK))
        tail = "\n".join(errors.splitlines()[-12:])
        raise ExportError(
            f"The clean process loads the SavedModel as a server does. Received: it ended with status "
            f"{self._process.returncode} while loading {request['path']}:\n{tail}"
        )


def validate_saved_model(
    path: str | Path,
    sample: str | Path | None = None,
    golden: str | Path | None = None,
    *,
    process: CleanProcess | None = None,
    skip: Iterable[str] = (),
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Loads a SavedModel, answers `sample`, or the rows in `golden`, and compares with the answers in `golden`.

    Args:
        sample, golden: .npz files, as _replay.replay takes them.
        process: a running CleanProcess; None replays in this process.
        skip: outputs that are random.
        tolerance: largest difference of floats, in units of max(1, largest |golden|) of each output.
    Returns: bitwise, largest (difference), rows, outputs, threads, seconds.
    Raises: ExportError: it does not load, or answers differ.
    """
    request = {
        "path": str(path),
        "sample": None if sample is None else str(sample),
        "golden": None if golden is None else str(golden),
        "skip": list(skip),
        "tolerance": tolerance,
    }
    if process is not None:
        answer = process.replay(request)
    else:
        try:
            answer = _replay.replay(**request)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
    if "failed" in answer:
        raise ExportError(
            f"A server must load the SavedModel and answer the stored sample. Received: {answer['failed']} "
            f"Nothing was published. Check the ops with scan_saved_model, and the TensorFlow version."
        )
    if answer["problems"]:
        listed = "; ".join(answer["problems"])
        raise ExportError(
            f"The SavedModel must answer the stored sample as the trained model did. Received: {listed}. Nothing was "
            f"published. Was the base graph written by another version of the model's code, or on another device?"
        )
    return answer
