"""Defines the formats other than SavedModel, and runs the processes that convert a model and run the result."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl import packages
from keras_ddl.errors import DependencyError, ExportError
from keras_ddl.export.formats import conversion
from keras_ddl.export.inference import replay
from keras_ddl.export.proof.scan import scan_saved_model
from keras_ddl.export.proof.validate import HALF_TOLERANCE, TOLERANCE

# 8-bit weights are off by up to 1/254 of the largest weight in their row, and errors add up over layers.
DYNAMIC_TOLERANCE = 0.1
_LARGEST = 2_000_000_000  # bytes of weights; a file in either format is one message of at most 2 GiB
_SECONDS = 3600.0
_LINES_SHOWN = 12  # of a longer list or of the converter's stderr, in a message


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes:
        name: name of the format, and of the pip extra that installs `modules`.
        file: name of the model's file in a version directory.
        runtime: the program that runs the model, as messages name it.
        package: the Python package of the runtime.
        modules: the modules that a conversion imports.
    """

    name: str
    file: str
    runtime: str
    package: str
    modules: tuple[str, ...]


FORMATS = {
    "onnx": Format("onnx", "model.onnx", "ONNX Runtime", "onnxruntime", ("tf2onnx", "onnx", "onnxruntime")),
    "tflite": Format("tflite", "model.tflite", "LiteRT", "ai-edge-litert", ("ai_edge_litert",)),
}


def require(chosen: Format) -> None:
    """Raises: DependencyError: a package of the format's extra is missing. Imports no package."""
    missing = packages.missing(chosen.modules)
    if missing:
        raise DependencyError(
            f"The format {chosen.name} needs {', '.join(chosen.modules)}. Received: an environment without "
            f"{', '.join(missing)}. Install the extra: {packages.pip_install(f'[{chosen.name}]')}"
        )


def convert(
    chosen: Format,
    path: Path,
    into: Path,
    sample: Path,
    golden: Path,
    *,
    name: str,
    opset: int | None,
    quantize: str | None,
) -> dict[str, Any]:
    """Converts the SavedModel `path` to the file `into`; writes the rows in `sample` and its outputs to `golden`.

    Args:
        name: the model's name in messages.
    Returns: the entries half, random, warnings and versions of the result of conversion.py.
    Raises: ExportError: the format lacks operations, which are named with their nodes, or the converter fails.
    """
    scan_saved_model(path).raise_for_problems(name)
    size = sum(file.stat().st_size for file in (path / "variables").glob("*"))
    if size > _LARGEST:
        raise ExportError(
            f"{chosen.name} holds at most {_LARGEST / 1e9:.3g} GB. Received: {name} with {size / 1e9:.3g} GB of "
            "weights. Serve the SavedModel."
        )
    files = {"path": str(path), "into": str(into), "sample": str(sample), "golden": str(golden)}
    how = {"tolerance": TOLERANCE, "opset": opset, "quantize": quantize}
    result = _run({"task": "convert", "kind": chosen.name, **files, **how}, f"converts {name} to {chosen.name}")
    if "unsupported" in result:
        nodes = [f"{op} (node {node!r})" for op, node in result["unsupported"]]
        more = [f"and {len(nodes) - _LINES_SHOWN} more"] if len(nodes) > _LINES_SHOWN else []
        listed = "\n  ".join([*nodes[:_LINES_SHOWN], *more])
        message = f"The converter says: {result['failed']}. " if result["failed"] else ""
        raise ExportError(
            f"{chosen.name} has only some of TensorFlow's operations. Received: {name} with\n  {listed}\n{message}"
            f"Nothing was published. Serve the SavedModel, or write call(training=False) without them."
        )
    if "failed" in result:
        raise ExportError(
            f"The converter could not convert the SavedModel. Received: {result['failed']} for {name} to "
            f"{chosen.name}. Nothing was published. Serve the SavedModel."
        )
    return result


def prove(
    chosen: Format, file: Path, golden: Path, answers: Path, *, half: bool, random: list[str], quantize: str | None
) -> dict[str, Any]:
    """Runs the converted model on the rows in `golden`, and compares its outputs with the SavedModel's.

    Args:
        answers: a temporary file for the converted model's outputs.
        half: whether the model computes in 16 bits.
        random: outputs that are not compared.
    Returns: inputs, outputs (name -> [dtype, shape]), versions, rows, largest, tolerance, proof (a summary in words).
    Raises: ExportError: the runtime cannot load the file, or outputs differ.
    """
    files = {"file": str(file), "golden": str(golden), "into": str(answers)}
    result = _run({"task": "run", "kind": chosen.name, **files}, f"runs {chosen.runtime}")
    if "failed" in result:
        raise ExportError(
            f"{chosen.runtime} must load the converted model and answer the sample. Received: {result['failed']}. "
            "Nothing was published. Serve the SavedModel."
        )
    expected, received = replay.load_rows(str(golden), replay.ANSWERS), replay.load_rows(str(answers))
    expected, received = ({name: each[name] for name in each if name not in random} for each in (expected, received))
    tolerance = HALF_TOLERANCE if half or quantize == "float16" else TOLERANCE
    tolerance = DYNAMIC_TOLERANCE if quantize == "dynamic" else tolerance
    compared = replay.compare(expected, received, tolerance)
    if compared["problems"]:
        raise ExportError(
            f"{chosen.runtime} must answer the sample as the SavedModel does. Received: "
            f"{'; '.join(compared['problems'])}. Nothing was published. "
            f"{'Leave quantize out.' if quantize else 'Serve the SavedModel.'}"
        )
    rows = max((len(row) for row in replay.load_rows(str(golden), replay.ROWS).values() if row.ndim), default=1)
    same = "bit for bit" if compared["bitwise"] else f"to within {compared['largest']:.1e} (allowed {tolerance:.0e})"
    skipped = f" (random, not compared: {', '.join(random)})" if random else ""
    runtime = f"{chosen.runtime} {result['versions'][chosen.package]}"
    proof = f"{runtime} answers {rows} rows as the SavedModel does, {same}{skipped}"
    return {**result, "rows": rows, "largest": compared["largest"], "tolerance": tolerance, "proof": proof}


def _run(request: dict[str, Any], what: str) -> dict[str, Any]:
    """Runs conversion.py on the request, and returns its result. Raises: ExportError: it ended without one."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", conversion.__file__],
            input=json.dumps(request) + "\n",
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ExportError(
            f"The process that {what} must end in time. Received: no result after {_SECONDS:.0f} s."
        ) from None
    for line in done.stdout.splitlines():
        if line.startswith(conversion.MARK):
            return json.loads(line.removeprefix(conversion.MARK))
    tail = "\n".join(done.stderr.splitlines()[-_LINES_SHOWN:])
    raise ExportError(
        f"The process that {what} must return a result. Received: it ended with status {done.returncode}:\n{tail}"
    )
