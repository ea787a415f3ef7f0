"""Exports in other formats than SavedModel: ONNX and TensorFlow Lite, converted from one and compared with it.

A version directory holds one file, model.onnx or model.tflite, and keras_ddl_export.json; it appears whole, by one
rename, as those of SavedModels do.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.errors import ConfigError, ExportError
from keras_ddl.export import versions
from keras_ddl.export import warmup as warmup_file
from keras_ddl.export.formats import converters
from keras_ddl.export.graft import ExportResult
from keras_ddl.export.manifest import PROVENANCE
from keras_ddl.export.proof import replay
from keras_ddl.files import digests, durable

OPSETS = (9, 18)  # that tf2onnx 1.17 writes, and that have what conversion.py adds to it
QUANTIZED = ("float16", "dynamic")
_WHAT = "An export"


def export_format(
    source: str | Path | Callable[[Path], ExportResult],
    out_dir: str | Path,
    *,
    format: str,
    opset: int | None = None,
    quantize: str | None = None,
    sample: str | Path | None = None,
    version: int | str | None = None,
    keep: int | None = None,
) -> ExportResult:
    """Writes `out_dir/<version>/model.onnx` or `model.tflite`: the `serving_default` of a SavedModel.

    Args:
        source: a SavedModel, anyone's; or a function that exports one into the directory that it gets, which is removed
            at the end: functools.partial(export_saved_model, "checkpoints").
        format: 'onnx' or 'tflite'.
        opset: of ONNX; None: what tf2onnx prefers, 15.
        quantize: for TensorFlow Lite, weights in fewer bits: 'float16', or 'dynamic' for 8 bits.
        sample: .npz of input name -> rows to compare on; None: the SavedModel's warm-up request, which holds the sample
            of an export of ours, or else made-up rows.
        version, keep: as of `export_saved_model`; 'step' needs a source with a step.
    Returns: the result, whose `proof` says by how much answers differ from the SavedModel's.
    Raises: DependencyError: a package is missing. ExportError: the format lacks an operation, which is named; answers
        differ; and as of `export_saved_model`. Nothing is published then.
    Cost: a process that imports TensorFlow and converts, one of the runtime, and the SavedModel on disk meanwhile.
    """
    chosen = _chosen(format, opset, quantize)
    converters.require(chosen)
    out_dir = Path(out_dir)
    # Before the costly steps: mistakes show at once.
    final = versions.choose(out_dir, None if version == "step" else version, None, chosen.file)
    with contextlib.ExitStack() as stack:
        stack.enter_context(bundle.translated(_WHAT, final, ExportError))
        work = stack.enter_context(durable.staging_directory(out_dir))
        made = source(work) if callable(source) else _given(Path(source))
        if version == "step":
            if made.step is None:
                raise ConfigError(f"version='step' needs a source with a step. Received: {made.path}.")
            final = versions.choose(out_dir, made.step, None, chosen.file)
        start = time.perf_counter()
        staged, golden = work / "version", work / "golden.npz"
        staged.mkdir()
        rows, kind = (Path(sample), str(sample)) if sample is not None else _rows(made.path, work / "rows.npz")
        found = converters.convert(
            chosen,
            made.path,
            staged / chosen.file,
            rows,
            golden,
            name="the model" if callable(source) else str(source),
            opset=opset,
            quantize=quantize,
        )
        converted = time.perf_counter()
        proved = converters.prove(
            chosen,
            staged / chosen.file,
            golden,
            work / "answers.npz",
            half=found["half"],
            random=found["random"],
            quantize=quantize,
        )
        compared = time.perf_counter()
        record = {
            "format": chosen.name,
            "step": made.step,
            "epoch": made.epoch,
            "metrics": dict(made.metrics),
            "saved_model": made.proof,
            "quantize": quantize,
            "sample": kind,
            **found,
            **proved,
            "versions": found["versions"] | proved["versions"],
            "sha256": digests.digest(staged / chosen.file),
        }
        (staged / PROVENANCE).write_text(json.dumps(record, indent=1))
        size = (staged / chosen.file).stat().st_size
        final = versions.publish(staged, final, automatic=version is None)
        removed = versions.prune(final, keep) if keep is not None else []
    return replace(
        made,
        path=final,
        version=int(final.name),
        bytes=size,
        seconds={**made.seconds, "convert": converted - start, "compare": compared - converted},
        proof=f"{proved['proof']}; the SavedModel {made.proof}",
        warnings=(*made.warnings, *found["warnings"]),
        removed=tuple(int(each.name) for each in removed),
    )


def _chosen(name: str, opset: int | None, quantize: str | None) -> converters.Format:
    if opset is not None and (name != "onnx" or not OPSETS[0] <= opset <= OPSETS[1]):
        raise ConfigError(f"opset, of ONNX, is {OPSETS[0]} to {OPSETS[1]}. Received: {opset!r} for {name}.")
    if quantize is not None and (name != "tflite" or quantize not in QUANTIZED):
        raise ConfigError(
            f"quantize, of TensorFlow Lite, is one of {', '.join(map(repr, QUANTIZED))}. Received: {quantize!r} for "
            f"{name}."
        )
    if name not in converters.FORMATS:
        raise ConfigError(f"format is one of {', '.join(map(repr, converters.FORMATS))}. Received: {name!r}.")
    return converters.FORMATS[name]


def _given(path: Path) -> ExportResult:
    """A SavedModel that is there, described as if it were exported now."""
    if not (path / "saved_model.pb").is_file():
        raise ExportError(f"What is converted is a SavedModel. Received: {path}, without saved_model.pb.")
    return ExportResult(path, 0, None, None, {}, 0, {}, f"is {path}")


def _rows(path: Path, into: Path) -> tuple[Path, str]:
    """Writes rows that the SavedModel takes to the file `into`, and says where they come from."""
    import tensorflow as tf

    from keras_ddl.export.proof.check import signatures_of
    from keras_ddl.export.tracing.inputs import Inputs

    signature = signatures_of(path).get("serving_default")
    if signature is None:
        raise ExportError(f"What is converted is the signature serving_default. Received: {path}, without it.")
    rows, kind = warmup_file.read(path / "assets.extra" / warmup_file.FILE), "stored"
    if rows is None:
        specs = {name: tf.TensorSpec(shape, dtype) for name, (dtype, shape) in signature["inputs"].items()}
        unknown = [name for name, spec in specs.items() if spec.shape.rank is None]
        if unknown:
            raise ExportError(
                f"Rows can be made up for inputs of known rank. Received: {unknown} of {path}. Give them: sample=."
            )
        rows, kind = Inputs("", specs).made_up_sample(), "made up"
    replay.save(into, {name: replay.storable(row) for name, row in rows.items()})
    return into, kind
