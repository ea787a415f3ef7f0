"""Checks any SavedModel, not only exported ones: can a server load it, and does it answer?"""

from __future__ import annotations

import contextlib
import json
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export.inference import composites
from keras_ddl.export.inference.replay import load_rows, save
from keras_ddl.export.manifest import PROVENANCE
from keras_ddl.export.proof.scan import scan_saved_model
from keras_ddl.export.proof.validate import CleanProcess, validate_saved_model
from keras_ddl.files import foreign

_ROWS = 2  # how many rows to make up


@dataclass(frozen=True)
class CheckReport:
    """The result of a check. The SavedModel can be served if there are no `problems`.

    Attributes:
        ops: op -> number of nodes.
        signatures: name -> {"inputs": ..., "outputs": ..., "method": ...}; inputs and outputs: name -> [dtype, shape].
        answers: the rows that were run and the outputs returned, in words; "" if no row could be run.
        seconds: time to load and time to answer.
    """

    path: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    ops: dict[str, int]
    signatures: dict[str, Any]
    answers: str
    seconds: dict[str, float]

    def text(self) -> str:
        """Returns the report as text."""
        lines = [f"{self.path}: {'cannot be served' if self.problems else 'can be served'}"]
        lines += [f"  problem: {each}" for each in self.problems]
        lines += [f"  warning: {each}" for each in self.warnings]
        for name, signature in sorted(self.signatures.items()):
            described = [
                ", ".join(f"{alias} {dtype}{shape}" for alias, (dtype, shape) in sorted(signature[kind].items()))
                for kind in ("inputs", "outputs")
            ]
            lines.append(f"  signature {name}: {described[0] or 'nothing'} -> {described[1] or 'nothing'}")
        lines.append(f"  ops: {sum(self.ops.values())} nodes of {len(self.ops)} kinds")
        lines += [f"  answers: {self.answers}"] if self.answers else []
        return "\n".join(lines) + "\n"

    def write(self) -> tuple[Path, Path]:
        """Writes <version>.check.txt and .check.json beside the version, where servers ignore them; returns both."""
        version = Path(self.path)
        files = version.with_name(f"{version.name}.check.txt"), version.with_name(f"{version.name}.check.json")
        files[0].write_text(self.text())
        files[1].write_text(json.dumps(asdict(self), indent=1) + "\n")
        return files


def check_saved_model(
    path: str | Path, *, sample: str | Path | None = None, allow_ops: tuple[str, ...] = ()
) -> CheckReport:
    """Scans a SavedModel's graph for ops that no server runs, loads it in a clean process, and runs rows through it.

    Args:
        sample: .npz of input name -> rows; None: zeros, or "" for strings.
        allow_ops: custom ops that the server is known to have.
    Raises: ExportError: there is no SavedModel, or it has no `serving_default`; the sample does not fit its inputs.
    Cost: a process that loads the weights.
    """
    path = Path(path)
    scan = scan_saved_model(path, allow_ops)
    signatures = signatures_of(path)
    if "serving_default" not in signatures:
        raise ExportError(
            f"A SavedModel must have a signature serving_default to be served. Received: {path}, with "
            f"{sorted(signatures) or 'none'}."
        )
    problems, answers, seconds = list(scan.problems), "", {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        inputs = signatures["serving_default"]["inputs"]
        if sample is not None:
            _check_sample(Path(sample), inputs, path)
        rows = Path(sample) if sample is not None else _make_up_rows(inputs, path, folder)
        if not problems:  # a graph with foreign ops would not load
            try:
                answer = validate_saved_model(path, rows, process=stack.enter_context(CleanProcess()))
            except ExportError as error:
                problems.append(str(error.__cause__ or error))
            else:
                kind = f"{sample}" if sample is not None else "made up (zeros)"
                answers = f"{answer['rows']} rows, {kind}, with {', '.join(answer['outputs'])}"
                seconds = answer["seconds"]
    return CheckReport(str(path), tuple(problems), scan.warnings, scan.ops, signatures, answers, seconds)


def signatures_of(path: Path) -> dict[str, Any]:
    """Returns the signatures of a SavedModel, in the form of `CheckReport.signatures`.

    Raises: ExportError: it has no graph tagged 'serve'.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    served = [graph for graph in saved.meta_graphs if "serve" in graph.meta_info_def.tags]
    if not served:
        raise ExportError(f"The graph to serve must be tagged 'serve'. Received: {path}, which has none.")

    def described(tensors: Any) -> dict[str, Any]:
        shapes = {name: tf.TensorShape(info.tensor_shape) for name, info in tensors.items()}
        return {
            name: [tf.as_dtype(info.dtype).name, None if shapes[name].rank is None else shapes[name].as_list()]
            for name, info in tensors.items()
        }

    return {
        name: {
            "inputs": described(signature.inputs),
            "outputs": described(signature.outputs),
            "method": signature.method_name,
        }
        for name, signature in served[0].signature_def.items()
        if not name.startswith("__")
    }


def _check_sample(sample: Path, inputs: dict[str, Any], path: Path) -> None:
    """Checks the sample before the model runs, so that a mistake in it is not reported as a problem of the SavedModel.

    Raises: ExportError: the sample cannot be read, or its rows do not fit the inputs.
    """
    import tensorflow as tf

    rule = f"The sample must be an .npz file with rows for each input of {path}. Received: {sample}"
    try:
        rows = load_rows(str(sample))
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ExportError(f"{rule}: {error}") from error
    listed = ", ".join(f"{name} {dtype}{shape}" for name, (dtype, shape) in sorted(inputs.items()))
    fits = set(rows) == set(inputs) and all(
        tf.TensorShape(inputs[name][1]).is_compatible_with(row.shape) for name, row in rows.items()
    )
    if not fits:
        received = ", ".join(f"{name} {row.dtype}{list(row.shape)}" for name, row in sorted(rows.items()))
        raise ExportError(f"{rule} with {received or 'nothing'}; the inputs are {listed}.")


def _make_up_rows(inputs: dict[str, Any], path: Path, folder: Path) -> Path:
    """Writes rows of zeros that fit the inputs to a file in `folder`, and returns its path."""
    import numpy as np
    import tensorflow as tf

    rows = {}
    for name, (dtype, shape) in inputs.items():
        sizes = [_ROWS if size is None else size for size in (shape if shape is not None else [None])]
        rows[name] = np.zeros(sizes, "S1" if dtype == "string" else tf.as_dtype(dtype).as_numpy_dtype)
    # Exports of keras_ddl record shapes; other SavedModels tell only the names of their inputs.
    provenance = path / "assets.extra" / PROVENANCE
    record = foreign.parse_json(provenance.read_text()) if provenance.is_file() else {}
    shapes = dict.fromkeys(composites.found_in(inputs)) | record.get("composites", {})
    save(folder / "rows.npz", composites.make_consistent(shapes, rows))
    return folder / "rows.npz"
