"""The graft: a base graph and a checkpoint's weights become a versioned SavedModel. No Keras, no user code.

saved_model.pb and the assets are copied byte for byte; variables/ is written anew from the checkpoint, key to key.
TensorFlow Serving polls the directory of versions, so a version appears by one rename, whole, and is never changed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl import _durable, model_state
from keras_ddl import _tensor_bundle as bundle
from keras_ddl import checkpoint as ckpt
from keras_ddl.errors import ConfigError, ExportError
from keras_ddl.export import manifest, versions
from keras_ddl.export import warmup as warmup_file
from keras_ddl.export.scan import scan_saved_model
from keras_ddl.export.validate import HALF_TOLERANCE, TOLERANCE, CleanProcess, validate_saved_model

PROVENANCE = "keras_ddl_export.json"
_WHAT = "An export"
_MOST = 5


@dataclass(frozen=True)
class ExportResult:
    """What was exported. `seconds` holds the stages in order; `proof` says in words how outputs were compared."""

    path: Path
    version: int
    step: int | None
    epoch: int | None
    metrics: Mapping[str, float]
    bytes: int
    seconds: Mapping[str, float]
    proof: str
    warnings: tuple[str, ...] = field(default=())


def export_saved_model(
    ckpt_dir: str | Path,
    out_dir: str | Path,
    *,
    which: str | int = "latest",
    version: int | str | None = None,
    metric: str | None = None,
    mode: str = "auto",
    validate: str = "process",
    warmup: bool = True,
    model_name: str = "default",
) -> ExportResult:
    """Writes `out_dir/<version>/`, a SavedModel that TensorFlow Serving loads, from a checkpoint directory.

    Args:
        which: 'latest', 'best' (of `metric`, by `mode`) or a step.
        version: a number; None for the highest in `out_dir` plus one; 'step' for the checkpoint's step.
        validate: 'process' replays the stored sample in a clean process, 'here' in this one, 'off' not at all.
        warmup: write assets.extra/tf_serving_warmup_requests from the stored sample, under `model_name`.
    Raises: CheckpointError: no such checkpoint, or damaged. ExportError: the version exists, out_dir is not writable,
        no base graph, custom ops, NaN weights, outputs differ. Nothing is published then.
    Cost: reads and writes the weights once; importing TensorFlow, here and in the clean process, takes longest.
    """
    if validate not in ("process", "here", "off"):
        raise ConfigError(f"validate is one of 'process', 'here', 'off'. Received: {validate!r}.")
    clock = _Clock()
    found = ckpt.find(ckpt_dir, which, metric, mode)
    final = versions.choose(
        Path(out_dir), version, found.step
    )  # before the costly steps, so that mistakes show at once
    with contextlib.ExitStack() as stack:
        # Started now, its import of TensorFlow runs beside the work here.
        process = stack.enter_context(CleanProcess()) if validate == "process" else None
        ckpt.validate(found)
        base = manifest.read(ckpt_dir)
        clock.lap("verify")
        import tensorflow  # noqa: F401

        clock.lap("import tensorflow")
        _refuse_stale(found, base)
        scan = scan_saved_model(base.path, base["allow_ops"])
        scan.raise_for_problems(str(base.path))
        tensors = _weights(found, base)
        clock.lap("read")
        stack.enter_context(bundle.translated(_WHAT, final, ExportError))
        staged = stack.enter_context(_durable.staging_directory(final.parent))
        _fill(staged, base, tensors)
        if warmup and base.sample:
            _write_warmup(staged, base, model_name)
        _write_provenance(staged, base, found, final)
        clock.lap("write")
        proof = _prove(staged, base, found, process, validate)
        clock.lap("validate")
        size = sum(record["bytes"] for record in _durable.inventory(staged).values())
        versions.publish(staged, final)
        clock.lap("publish")
    return ExportResult(
        path=final,
        version=int(final.name),
        step=found.step,
        epoch=found.epoch,
        metrics=dict(found.metrics or {}),
        bytes=size,
        seconds=clock.laps,
        proof=proof,
        warnings=tuple(base["warnings"]),
    )


def _weights(found: ckpt.Checkpoint, base: manifest.Manifest) -> dict[str, Any]:
    """Returns base key -> tensor from the checkpoint; names, dtypes and shapes are compared, numbers must be finite."""
    state = found.state or {}
    source = model_state.match(base["variables"], state["weights"], "weight", found.path)
    specs = {key: (dtype, tuple(shape)) for key, dtype, shape in [*base["variables"], *base["untracked"]]}
    wanted = {key: source[key] for key in base["captured"]} | {key: key for key, _, _ in base["untracked"]}
    with bundle.translated(_WHAT, found.path, ExportError):
        held = bundle.entries(found.weights)
        for key, stored in wanted.items():
            if held.get(stored) != specs[key]:
                raise ExportError(
                    f"A checkpoint brings every variable that the base graph reads. Received: {found.path} with "
                    f"{held.get(stored) or 'nothing'} for {bundle.name_of(key)!r}, which is {specs[key]} in the graph. "
                    f"Save with save_checkpoint(base=...), or export a checkpoint of the run that wrote the graph."
                )
        tensors = bundle.read(found.weights, {stored: specs[key][0] for key, stored in wanted.items()})
    values = {key: tensors[stored] for key, stored in wanted.items()}
    _refuse_not_finite(values, found)
    return values


def _refuse_not_finite(values: Mapping[str, Any], found: ckpt.Checkpoint) -> None:
    import tensorflow as tf

    bad = []
    for key, value in values.items():
        if value.dtype.is_floating or value.dtype.is_complex:
            # float8 has no is_finite kernel; widening keeps NaN and Inf.
            wide = value if value.dtype.size > 1 else tf.cast(value, tf.float32)
            count = int(tf.size(value)) - int(tf.math.count_nonzero(tf.math.is_finite(tf.math.abs(wide))))
            if count:
                bad.append(f"{bundle.name_of(key)} ({count} of {int(tf.size(value))})")
    if bad:
        more = f" and {len(bad) - _MOST} more" if len(bad) > _MOST else ""
        raise ExportError(
            f"Weights must be finite numbers to be served. Received: NaN or Inf at step {found.step} in "
            f"{', '.join(bad[:_MOST])}{more}. Export an earlier step, and look for the divergence in training."
        )


def _refuse_stale(found: ckpt.Checkpoint, base: manifest.Manifest) -> None:
    """The graph holds some values as constants (Normalization's statistics): training must not have moved them."""
    evidence = (found.state or {}).get("base") or {}
    if evidence.get("agrees") is False:
        raise ExportError(
            f"The base graph must answer as the model did when step {found.step} was saved. Received: "
            f"{'; '.join(evidence['problems'])}. Something that the graph holds as a constant was changed after "
            f"training began (an attribute of a layer, an adapt()). Set it before fit(), or make it a weight."
        )
    if evidence.get("agrees") is None and base["constants"]:
        state = found.state or {}
        source = model_state.match(base["variables"], state["weights"], "weight", found.path)
        dtypes = {key: dtype for key, dtype, _ in base["variables"]}
        with bundle.translated(_WHAT, found.path, ExportError):
            held = bundle.read(found.weights, {source[key]: dtypes[key] for key in base["constants"]})
        for key, expected in base["constants"].items():
            if _durable.digest_bytes(held[source[key]].numpy().tobytes()) != expected:
                raise ExportError(
                    f"What the base graph holds as a constant must not change in training. Received: "
                    f"{bundle.name_of(key)!r} at step {found.step} differs from when the graph was traced. Call "
                    f"adapt() before fit(), or save checkpoints with base=, which tells whether it matters."
                )


def _fill(staged: Path, base: manifest.Manifest, weights: Mapping[str, Any]) -> None:
    from tensorflow.core.protobuf import fingerprint_pb2

    shutil.copyfile(base.path / "saved_model.pb", staged / "saved_model.pb")
    if (base.path / "assets").is_dir():
        shutil.copytree(base.path / "assets", staged / "assets")
    (staged / "assets").mkdir(exist_ok=True)
    (staged / "variables").mkdir()
    static = str(base.path / manifest.STATIC)
    kept = bundle.read(static, {key: dtype for key, (dtype, _) in bundle.entries(static).items()})
    bundle.write(str(staged / "variables" / "variables"), {**kept, **weights})
    if (base.path / "fingerprint.pb").exists():
        fingerprint = fingerprint_pb2.FingerprintDef.FromString((base.path / "fingerprint.pb").read_bytes())
        # Of one graph's versions only this field differs. Any 64 bits that follow the weights serve as its hash.
        index = _durable.digest(staged / "variables" / "variables.index")
        fingerprint.checkpoint_hash = int(index[:16], 16)
        (staged / "fingerprint.pb").write_bytes(fingerprint.SerializeToString(deterministic=True))
    (staged / "assets.extra").mkdir()


def _write_warmup(staged: Path, base: manifest.Manifest, model_name: str) -> None:
    import numpy as np

    with np.load(base.sample) as archive:
        rows = {name: archive[name] for name in archive.files}
    warmup_file.write(staged / "assets.extra" / warmup_file.FILE, rows, base["inputs"], model_name)


def _write_provenance(staged: Path, base: manifest.Manifest, found: ckpt.Checkpoint, final: Path) -> None:
    state = found.state or {}
    record = {
        "version": int(final.name),
        "checkpoint": found.path.name,
        "checkpoint_sha256": state["sha256"],
        "base_sha256": base["sha256"],
        **{name: state[name] for name in ("step", "epoch", "metrics")},
        **{name: base[name] for name in ("tensorflow", "keras", "inputs", "outputs", "signatures", "warnings")},
    }
    (staged / "assets.extra" / PROVENANCE).write_text(json.dumps(record, indent=1))


def _prove(
    staged: Path, base: manifest.Manifest, found: ckpt.Checkpoint, process: CleanProcess | None, how: str
) -> str:
    if how == "off":
        return "not compared (validate='off')"
    golden = found.path / model_state.GOLDEN
    answer = validate_saved_model(
        staged,
        base.sample,
        golden if golden.exists() else None,
        process=process,
        skip=base["random"],
        tolerance=HALF_TOLERANCE if base["half"] else TOLERANCE,
    )
    where = "in a clean process" if how == "process" else "in this process"
    if base.sample is None:
        return f"loads {where}; no sample to compare outputs on"
    if not golden.exists():
        return f"answers {answer['rows']} rows {where}; the checkpoint holds no outputs to compare with"
    same = "bit for bit" if answer["bitwise"] else f"within {answer['largest']:.1e}"
    skipped = f" (random, not compared: {', '.join(base['random'])})" if base["random"] else ""
    return f"answers {answer['rows']} rows ({base['sample']}) {where} as the trained model did, {same}{skipped}"


class _Clock:
    """Seconds of each stage, in order."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
