"""The weights that an export takes: from a checkpoint of keras_ddl or a file, checked before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl import checkpoint as ckpt
from keras_ddl.checkpoint import durable, model_state
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.errors import ExportError
from keras_ddl.export import weight_files
from keras_ddl.export.manifest import Manifest

_WHAT = "An export"
_MOST = 5


@dataclass(frozen=True)
class Source:
    """Where weights come from. `golden` is the file of outputs that they gave in training, if there is one."""

    path: Path
    step: int | None = None
    epoch: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    golden: Path | None = None
    checkpoint: ckpt.Checkpoint | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.path) if self.step is None else f"{self.path} (step {self.step})"


def source_of_checkpoint(found: ckpt.Checkpoint, name: str | None) -> Source:
    """Describes a checkpoint; `name`: of the part of the model that is exported."""
    golden = found.path / model_state.golden_file(name)
    return Source(
        found.path, found.step, found.epoch, dict(found.metrics or {}), golden if golden.exists() else None, found
    )


def read(source: Source, base: Manifest) -> dict[str, Any]:
    """Returns base key -> tensor of all that the graph reads.

    Raises: ExportError: one is missing or of another dtype or shape, or holds NaN or Inf; or something that the graph
        holds as a constant was moved by training.
    """
    if source.checkpoint is None and base["untracked"]:
        raise ExportError(
            f"This base graph reads variables that Keras does not track, which only checkpoints of keras_ddl hold. "
            f"Received: {source.path}. Use --which."
        )
    constants = base["constants"] if _agreement(source, base.name) is None else {}
    if source.checkpoint is not None:
        tensors = _from_checkpoint(source.checkpoint, base, list(constants))
    else:
        tensors = weight_files.read(source.path, base, [*base["captured"], *constants])
    for key, expected in constants.items():
        if durable.digest_bytes(tensors.pop(key).numpy().tobytes()) != expected:
            raise ExportError(
                f"What the base graph holds as a constant must not change in training. Received: "
                f"{bundle.name_of(key)!r} in {source.name} differs from when the graph was traced. Call adapt() before "
                f"fit(), or save checkpoints with base=, which tells whether it matters."
            )
    _refuse_not_finite(tensors, source)
    return tensors


def _agreement(source: Source, name: str | None) -> bool | None:
    """Whether live model and base graph gave the same answers when the weights were saved. Raises: ExportError: no."""
    if source.checkpoint is None:
        return None
    state = source.checkpoint.state or {}
    evidence = (state.get("base") if name is None else state.get("bases", {}).get(name)) or {}
    if evidence.get("agrees") is False:
        raise ExportError(
            f"The base graph must answer as the model did when step {source.step} was saved. Received: "
            f"{'; '.join(evidence['problems'])}. Something that the graph holds as a constant was changed after "
            f"training began (an attribute of a layer, an adapt()). Set it before fit(), or make it a weight."
        )
    return evidence.get("agrees")


def _from_checkpoint(found: ckpt.Checkpoint, base: Manifest, constants: list[str]) -> dict[str, Any]:
    stored = model_state.match(base["variables"], (found.state or {})["weights"], "weight", found.path)
    specs = {key: (dtype, tuple(shape)) for key, dtype, shape in [*base["variables"], *base["untracked"]]}
    wanted = {key: stored[key] for key in [*base["captured"], *constants]}
    wanted |= {key: key for key, _, _ in base["untracked"]}
    with bundle.translated(_WHAT, found.path, ExportError):
        held = bundle.entries(found.weights)
        for key, place in wanted.items():
            if held.get(place) != specs[key]:
                raise ExportError(
                    f"A checkpoint brings every variable that the base graph reads. Received: {found.path} with "
                    f"{held.get(place) or 'nothing'} for {bundle.name_of(key)!r}, which is {specs[key]} in the graph. "
                    f"Save with save_checkpoint(base=...), or export a checkpoint of the run that wrote the graph."
                )
        tensors = bundle.read(found.weights, {place: specs[key][0] for key, place in wanted.items()})
    return {key: tensors[place] for key, place in wanted.items()}


def _refuse_not_finite(tensors: Mapping[str, Any], source: Source) -> None:
    import tensorflow as tf

    bad = []
    for key, value in tensors.items():
        if value.dtype.is_floating or value.dtype.is_complex:
            # float8 has no is_finite kernel; widening keeps NaN and Inf.
            wide = value if value.dtype.size > 1 else tf.cast(value, tf.float32)
            count = int(tf.size(value)) - int(tf.math.count_nonzero(tf.math.is_finite(tf.math.abs(wide))))
            if count:
                bad.append(f"{bundle.name_of(key)} ({count} of {int(tf.size(value))})")
    if bad:
        more = f" and {len(bad) - _MOST} more" if len(bad) > _MOST else ""
        raise ExportError(
            f"Weights must be finite numbers to be served. Received: NaN or Inf in {source.name}: "
            f"{', '.join(bad[:_MOST])}{more}. Export an earlier step, and look for the divergence in training."
        )
