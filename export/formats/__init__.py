"""Exports to ONNX and TensorFlow Lite: converts a SavedModel, and compares the outputs of both.

A version directory holds model.onnx or model.tflite, and keras_ddl_export.json. It appears complete, by one rename, as
SavedModel versions do.
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
from keras_ddl.export.inference import replay
from keras_ddl.export.manifest import PROVENANCE
from keras_ddl.files import digests, durable

OPSETS = (9, 18)  # lowest and highest that tf2onnx 1.17 writes and that have the Erf which conversion.py needs
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
        source: any SavedModel; or a function that exports one into the temporary directory that is its argument:
            functools.partial(export_saved_model, "checkpoints").
        format: 'onnx' or 'tflite'.
        opset: the ONNX opset; None: tf2onnx's preference, 15.
        quantize: for TensorFlow Lite, weights in fewer bits: 'float16', or 'dynamic' for 8 bits.
        sample: .npz of input name -> rows on which outputs are compared; None: the rows of the SavedModel's warm-up
            request, which `export_saved_model` takes from its sample, or else made-up rows.
        version, keep: as in `export_saved_model`; 'step' needs a source with a step.
    Returns: the result, whose `proof` says by how much the outputs differ from the SavedModel's.
    Raises: DependencyError: a package is missing. ExportError: the format lacks an operation, which is named; outputs
        differ; or as `export_saved_model`. Nothing is published then.
    Cost: one process that imports TensorFlow and converts, one that runs the result, and disk space for the SavedModel.
    """
    target = _target(format, opset, quantize)
    converters.require(target)
    out_dir = Path(out_dir)
    # Before the costly steps: mistakes show at once.
    final = versions.choose(out_dir, None if version == "step" else version, None, target.file)
    with contextlib.ExitStack() as stack:
        stack.enter_context(bundle.translated(_WHAT, final, ExportError))
        work = stack.enter_context(durable.staging_directory(out_dir))
        exported = source(work) if callable(source) else _existing(Path(source))
        if version == "step":
            if exported.step is None:
                raise ConfigError(f"version='step' needs a source with a step. Received: {exported.path}.")
            final = versions.choose(out_dir, exported.step, None, target.file)
        start = time.perf_counter()
        staged, golden = work / "version", work / "golden.npz"
        staged.mkdir()
        rows, kind = (Path(sample), str(sample)) if sample is not None else _rows(exported.path, work / "rows.npz")
        conversion = converters.convert(
            target,
            exported.path,
            staged / target.file,
            rows,
            golden,
            name="the model" if callable(source) else str(source),
            opset=opset,
            quantize=quantize,
        )
        converted = time.perf_counter()
        comparison = converters.prove(
            target,
            staged / target.file,
            golden,
            work / "answers.npz",
            half=conversion["half"],
            random=conversion["random"],
            quantize=quantize,
        )
        compared = time.perf_counter()
        record = {
            "format": target.name,
            "step": exported.step,
            "epoch": exported.epoch,
            "metrics": dict(exported.metrics),
            "saved_model": exported.proof,
            "quantize": quantize,
            "sample": kind,
            **conversion,
            **comparison,
            "versions": conversion["versions"] | comparison["versions"],
            "sha256": digests.digest(staged / target.file),
        }
        (staged / PROVENANCE).write_text(json.dumps(record, indent=1))
        size = (staged / target.file).stat().st_size
        final, removed = versions.publish(staged, final, keep, automatic=version is None)
    return replace(
        exported,
        path=final,
        version=int(final.name),
        bytes=size,
        seconds={**exported.seconds, "convert": converted - start, "compare": compared - converted},
        proof=f"{comparison['proof']}; the SavedModel {exported.proof}",
        warnings=(*exported.warnings, *conversion["warnings"]),
        removed=removed,
    )


def _target(name: str, opset: int | None, quantize: str | None) -> converters.Format:
    if opset is not None and (name != "onnx" or not OPSETS[0] <= opset <= OPSETS[1]):
        raise ConfigError(
            f"opset must be {OPSETS[0]} to {OPSETS[1]}, and only ONNX takes it. Received: {opset!r} for {name}."
        )
    if quantize is not None and (name != "tflite" or quantize not in QUANTIZED):
        raise ConfigError(
            f"quantize must be one of {', '.join(map(repr, QUANTIZED))}, and only TensorFlow Lite takes it. Received: "
            f"{quantize!r} for {name}."
        )
    if name not in converters.FORMATS:
        raise ConfigError(f"format must be one of {', '.join(map(repr, converters.FORMATS))}. Received: {name!r}.")
    return converters.FORMATS[name]


def _existing(path: Path) -> ExportResult:
    """Describes an existing SavedModel as if it had just been exported."""
    if not (path / "saved_model.pb").is_file():
        raise ExportError(f"Only a SavedModel can be converted. Received: {path}, without saved_model.pb.")
    return ExportResult(path, 0, None, None, {}, 0, {}, f"is {path}")


def _rows(path: Path, into: Path) -> tuple[Path, str]:
    """Writes rows that the SavedModel takes to the file `into`; returns the file, and whether they are made up."""
    import tensorflow as tf

    from keras_ddl.export.inference.inputs import Inputs
    from keras_ddl.export.proof.check import signatures_of

    signature = signatures_of(path).get("serving_default")
    if signature is None:
        raise ExportError(f"Only the signature serving_default can be converted. Received: {path}, which lacks it.")
    rows, kind = warmup_file.read(path / "assets.extra" / warmup_file.FILE), "stored"
    if rows is None:
        specs = {name: tf.TensorSpec(shape, dtype) for name, (dtype, shape) in signature["inputs"].items()}
        unknown = [name for name, spec in specs.items() if spec.shape.rank is None]
        if unknown:
            raise ExportError(f"Every input must have a known rank. Received: {unknown} of {path}. Give rows: sample=.")
        rows, kind = Inputs("", specs).made_up_sample(), "made up"
    replay.save(into, {name: replay.storable(row) for name, row in rows.items()})
    return into, kind
