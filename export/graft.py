"""Combines a base graph and a checkpoint's weights into a versioned SavedModel, without Keras or the user's code.

saved_model.pb and the assets are copied byte for byte; variables/ is rewritten from the checkpoint, key by key.
TensorFlow Serving polls the directory of versions, so a version appears complete, by one rename, and never changes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keras_ddl import checkpoint as ckpt
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint import verifying
from keras_ddl.compat.tensorflow_packages import import_without_keras
from keras_ddl.errors import ConfigError, ExportError
from keras_ddl.export import fingerprint, manifest, versions
from keras_ddl.export import warmup as warmup_file
from keras_ddl.export.inference import composites
from keras_ddl.export.inference.replay import DEFAULT, ROWS, load_rows, rows_of
from keras_ddl.export.proof.scan import scan_saved_model
from keras_ddl.export.proof.validate import HALF_TOLERANCE, TOLERANCE, CleanProcess, validate_saved_model
from keras_ddl.export.signatures import METHODS, declarations
from keras_ddl.export.sources.weights import Source, read, source_of_checkpoint
from keras_ddl.files import digests, durable, foreign

_WHAT = "An export"
_COPIED = ("saved_model.pb", "fingerprint.pb")


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    `seconds`: time of each stage, in order. `proof`: how outputs were compared, in words. `removed`: versions that
    `keep` removed.
    """

    path: Path
    version: int
    step: int | None
    epoch: int | None
    metrics: Mapping[str, float]
    bytes: int
    seconds: Mapping[str, float]
    proof: str
    warnings: tuple[str, ...] = field(default=())
    removed: tuple[int, ...] = field(default=())


def export_saved_model(
    ckpt_dir: str | Path,
    out_dir: str | Path,
    *,
    which: str | int = "latest",
    model: str | None = None,
    version: int | str | None = None,
    metric: str | None = None,
    mode: str = "auto",
    validate: str = "process",
    warmup: bool = True,
    model_name: str = "model",
    weights: str | Path | None = None,
    keep: int | None = None,
    signatures: Mapping[str, Any] | None = None,
) -> ExportResult:
    """Exports a checkpoint to `out_dir/<version>/`, a SavedModel that TensorFlow Serving loads.

    Args:
        which: 'latest', 'best' (of `metric`, by `mode`) or a step.
        model: the part of the model to export, by its name in training (`ExportBase(serve=...)`); None: the model
            itself, or the only part.
        version: a number; None for the highest in `out_dir` plus one; 'step' for the checkpoint's step.
        validate: 'process' replays the stored sample in a clean process, 'here' in this one; 'off' skips this.
        warmup: write assets.extra/tf_serving_warmup_requests from the stored sample, under `model_name`.
        weights: a .weights.h5 or .keras file or a TensorFlow checkpoint of the same model, whose weights are exported.
            Only the base graph is then read from `ckpt_dir`.
        keep: how many versions stay in `out_dir`, the highest ones and this one; None: all.
        signatures: name -> an output or layer, a list of them, a mapping from public names to them, or
            `EncodedImages(...)`. The name `serving_default` changes what that signature returns.
    Raises: CheckpointError: the checkpoint is missing or damaged. ExportError: the version exists, out_dir is not
        writable, no base graph, custom ops, NaN weights, outputs differ, a signature names an unknown output. Nothing
        is published then.
    Cost: reads and writes the weights once, holding half a gigabyte in memory, or the largest tensor, or the largest
        part of it if ranks have saved parts; then the clean process loads them. Importing TensorFlow takes longest.
    """
    if validate not in ("process", "here", "off"):
        raise ConfigError(f"validate must be 'process', 'here' or 'off'. Received: {validate!r}.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigError(f"keep must be the number of versions to keep, 1 or more, or None. Received: {keep!r}.")
    declared = declarations.read(signatures, functions=False, taken=METHODS)
    clock = _Clock()
    checkpoint = ckpt.find(ckpt_dir, which, metric, mode) if weights is None else None  # reports its errors first
    base = manifest.read(ckpt_dir, model)
    declarations.check_at_export(declared, base.record)
    if checkpoint is not None:
        source = source_of_checkpoint(checkpoint, base.name)
    else:
        assert weights is not None
        source = Source(Path(weights))
    final = versions.choose(Path(out_dir), version, source.step)  # early, so that mistakes show at once
    with contextlib.ExitStack() as stack:
        # Started early, so that it loads TensorFlow while this process works.
        process = stack.enter_context(CleanProcess()) if validate == "process" else None
        thread = stack.enter_context(ThreadPoolExecutor(1))
        intact = None
        if source.checkpoint is not None:  # hashed while TensorFlow is imported
            intact = thread.submit(verifying.validate_files, source.checkpoint)
        import_without_keras()
        clock.lap("import tensorflow")
        scan = scan_saved_model(base.path, base["allow_ops"])
        scan.raise_for_problems(str(base.path))
        if intact is not None and source.checkpoint is not None:
            intact.result()
            verifying.validate_entries(source.checkpoint)
        clock.lap("check files")
        stack.enter_context(bundle.translated(_WHAT, final, ExportError))
        staged = stack.enter_context(durable.staging_directory(final.parent))
        _fill(staged, base, read(source, base))
        if declared:
            base = replace(base, record={**base.record, **declarations.add_to(staged, declared, base.record)})
            scan_saved_model(staged, base["allow_ops"]).raise_for_problems(str(final))
        if warmup and base.sample:
            _write_warmup(staged, base, model_name)
        _write_provenance(staged, base, source)
        clock.lap("copy weights")
        on_disk = thread.submit(durable.sync_tree, staged)
        proof = _prove(staged, base, source, process, validate)
        clock.lap("validate")
        size = digests.size_of(staged)
        on_disk.result()
        final, removed = versions.publish(staged, final, keep, automatic=version is None)
        clock.lap("publish")
    return ExportResult(
        path=final,
        version=int(final.name),
        step=source.step,
        epoch=source.epoch,
        metrics=source.metrics,
        bytes=size,
        seconds=clock.laps,
        proof=proof,
        warnings=tuple(base["warnings"]),
        removed=removed,
    )


def _fill(staged: Path, base: manifest.Manifest, weights: Iterable[Mapping[str, Any]]) -> None:
    # Only listed files, nothing else in the directory.
    listed = [name for name in base["files"] if name in _COPIED or name.startswith("assets/")]
    foreign.copy(base.path, listed, staged)
    (staged / "assets").mkdir(exist_ok=True)
    (staged / "variables").mkdir()
    static = str(base.path / manifest.STATIC)
    kept = bundle.read(static, {key: dtype for key, (dtype, _) in bundle.entries(static).items()})
    bundle.write_in_parts(str(staged / "variables" / "variables"), weights, beside=kept)
    fingerprint.follow_weights(staged)
    (staged / "assets.extra").mkdir()


def _write_warmup(staged: Path, base: manifest.Manifest, model_name: str) -> None:
    rows = load_rows(str(base.sample))
    requests = [
        warmup_file.request(model_name, name, rows_of(name, rows, base["own_inputs"]), inputs)
        for name, inputs in ({DEFAULT: base["inputs"]} | base["own_inputs"]).items()
        if inputs
    ]
    warmup_file.write(staged / "assets.extra" / warmup_file.FILE, requests)


def _write_provenance(staged: Path, base: manifest.Manifest, source: Source) -> None:
    state = (source.checkpoint.state if source.checkpoint else None) or {}
    record = {
        "model": base.name,
        "checkpoint": source.path.name,
        "checkpoint_sha256": state.get("sha256"),
        "base_sha256": base["sha256"],
        **{name: state.get(name) for name in ("step", "epoch", "metrics")},
        **{name: base[name] for name in ("tensorflow", "keras", "inputs", "outputs", "signatures", "warnings")},
        "composites": base["composites"],
    }
    (staged / "assets.extra" / manifest.PROVENANCE).write_text(json.dumps(record, indent=1))


def _prove(staged: Path, base: manifest.Manifest, source: Source, process: CleanProcess | None, how: str) -> str:
    """Runs the SavedModel on the sample and compares its outputs with those of training. Returns the result in words.

    how: "process", "here" or "off", as in `export`.
    """
    if how == "off":
        return "not compared (validate='off')"
    tolerance = HALF_TOLERANCE if base["half"] else TOLERANCE
    answer = validate_saved_model(
        staged,
        base.sample,
        source.golden,
        process=process,
        skip=base["random"],
        tolerance=tolerance,
        signatures=base["declared"],
        images=base["images"],
        own_inputs=base["own_inputs"],
    )
    where = "in a clean process" if how == "process" else "in this process"
    if base.sample is None and source.golden is None:
        return f"loads {where}; no sample to compare outputs on"
    rows = load_rows(str(base.sample)) if source.golden is None else load_rows(str(source.golden), ROWS)
    rows = rows_of(DEFAULT, rows, base["own_inputs"])
    count = composites.rows_in(base["composites"], rows)
    answers = f"answers {count} {'row' if count == 1 else 'rows'} {where}"
    further = sorted(set(answer["asked"]) - {DEFAULT})
    also = f"; so do the signatures {', '.join(further)}" if further else ""
    if source.golden is None:
        return f"{answers}; no outputs of training to compare with{also}"
    same = "bit for bit" if answer["bitwise"] else f"to within {answer['largest']:.1e} (allowed {tolerance:.0e})"
    declared = {each for outputs in base["declared"].values() for each in outputs.values()}
    random = f" (random, not compared: {', '.join(base['random'])})" if base["random"] else ""
    unknown = sorted(declared - set(answer["compared"]) - set(base["random"]))
    return f"{answers} as the trained model did, {same}{random}{also}{_not_compared(unknown, base)}"


def _not_compared(layers: list[str], base: manifest.Manifest) -> str:
    images = sorted(base["images"])
    parts = [f"layers whose outputs training did not store: {', '.join(layers)}"] if layers else []
    parts += [f"encoded images ({', '.join(images)}), which were made up"] if images else []
    return f"; not compared: {'; '.join(parts)}" if parts else ""


class _Clock:
    """Measures the seconds of each stage, in order."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
