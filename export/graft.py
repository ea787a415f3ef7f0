"""The graft: a base graph and a checkpoint's weights become a versioned SavedModel. No Keras, no user code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ExportResult:
    """What was exported. `seconds` holds the stages in order; `proof` says how outputs were compared."""

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
    weights: str | Path | None = None,
) -> ExportResult:
    """Writes `out_dir/<version>/`, a SavedModel that TensorFlow Serving loads, from a checkpoint directory.

    Args:
        which: 'latest', 'best' (of `metric`, by `mode`) or a step.
        version: a number; None for the highest in `out_dir` plus one; 'step' for the checkpoint's step.
        validate: 'process' replays the stored sample in a clean process, 'here' in this one, 'off' not at all.
        warmup: write assets.extra/tf_serving_warmup_requests from the stored sample, under `model_name`.
        weights: a .weights.h5, .keras or TensorFlow checkpoint file to take the weights from instead.
    Raises: CheckpointError: no such checkpoint, or damaged. ExportError: version exists, out_dir not writable, no base
        graph, custom ops, NaN weights, outputs differ. Nothing is published then.
    """
    raise NotImplementedError
