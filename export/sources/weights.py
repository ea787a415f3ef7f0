"""Reads and checks the weights for an export, from a checkpoint of keras_ddl or from a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_ddl import checkpoint as ckpt
from keras_ddl import model_state
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.bundle_index import stored_boxes
from keras_ddl.errors import ExportError
from keras_ddl.export.manifest import Manifest
from keras_ddl.export.sources import weight_files
from keras_ddl.files import digests

if TYPE_CHECKING:
    from keras_ddl.cut.values.layouts import Box

_WHAT = "An export"
_MOST = 5
_GROUP_BYTES = 2**29
_SLICE = 2**24  # elements


@dataclass(frozen=True)
class Source:
    """A source of weights. `golden`: the file with the outputs that these weights gave in training, if it exists."""

    path: Path
    step: int | None = None
    epoch: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    golden: Path | None = None
    checkpoint: ckpt.Checkpoint | None = None

    @property
    def name(self) -> str:
        """The source's name in messages."""
        return str(self.path) if self.step is None else f"{self.path} (step {self.step})"


def source_of_checkpoint(checkpoint: ckpt.Checkpoint, name: str | None) -> Source:
    """Describes a checkpoint. `name`: the part of the model that is exported."""
    golden = checkpoint.path / model_state.golden_file(name)
    return Source(
        checkpoint.path,
        checkpoint.step,
        checkpoint.epoch,
        dict(checkpoint.metrics or {}),
        golden if golden.exists() else None,
        checkpoint,
    )


def read(source: Source, base: Manifest) -> Iterator[dict[str, Any]]:
    """Yields the weights that the graph reads, key -> tensor, in groups of half a gigabyte or one larger tensor. A
    larger tensor of which ranks have saved parts is yielded part by part, as `bundle.Part`.

    A caller that drops each group before it takes the next holds at most one group of a checkpoint in memory. Files of
    other kinds are read at once.
    Raises: ExportError: with the first group, if a variable is missing or has another dtype or shape, or training
        changed a constant of the graph; after the last group, if weights are NaN or Inf.
    """
    if source.checkpoint is None and base["untracked"]:
        raise ExportError(
            f"This base graph reads variables that Keras does not track, which only checkpoints of keras_ddl hold. "
            f"Received: {source.path}. Use --which."
        )
    constants = base["constants"] if _agreement(source, base.name) is None else {}
    if source.checkpoint is not None:
        groups = _from_checkpoint(source.checkpoint, base, list(constants))
    else:
        groups = iter([weight_files.read(source.path, base, [*base["captured"], *constants])])
    bad: list[str] = []
    for group in groups:
        for key in [key for key in constants if key in group]:
            if digests.digest_bytes(group.pop(key).numpy().tobytes()) != constants[key]:
                raise ExportError(
                    f"Constants of the base graph must not change in training. Received: "
                    f"{bundle.name_of(key)!r} in {source.name} differs from its value when the graph was traced. Call "
                    f"adapt() before fit(), or save checkpoints with base=, which compares outputs of model and graph."
                )
        bad += _not_finite(group)
        yield group
        del group  # frees it before the next one is read
    if bad:
        more = f" and {len(bad) - _MOST} more" if len(bad) > _MOST else ""
        raise ExportError(
            f"Weights must be finite numbers to be served. Received: NaN or Inf in {source.name}: "
            f"{', '.join(bad[:_MOST])}{more}. Export an earlier step, and look for the divergence in training."
        )


def _agreement(source: Source, name: str | None) -> bool | None:
    """Whether live model and base graph had equal outputs when the weights were saved; None: unknown.

    Raises: ExportError: their outputs differed.
    """
    if source.checkpoint is None:
        return None
    state = source.checkpoint.state or {}
    evidence = state["base"] if name is None else state["bases"].get(name, {})
    if evidence.get("agrees") is False:
        raise ExportError(
            f"The base graph must give the model's outputs as of step {source.step}. Received: "
            f"{'; '.join(evidence['problems'])}. A constant of the graph was changed after training began (an "
            f"attribute of a layer, an adapt()). Set it before fit(), or make it a weight."
        )
    return evidence.get("agrees")


def _from_checkpoint(checkpoint: ckpt.Checkpoint, base: Manifest, constants: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the weights of a checkpoint in groups that fit into memory, a larger one part by part."""
    stored = model_state.match(base["variables"], (checkpoint.state or {})["weights"], "weight", checkpoint.path)
    specs = {key: (dtype, tuple(shape)) for key, dtype, shape in [*base["variables"], *base["untracked"]]}
    wanted = {key: stored[key] for key in [*base["captured"], *constants]}
    wanted |= {key: key for key, _, _ in base["untracked"]}
    with bundle.translated(_WHAT, checkpoint.path, ExportError):
        entries, boxes = bundle.entries(checkpoint.weights), stored_boxes(checkpoint.weights)
        for key, place in wanted.items():
            if entries.get(place) != specs[key]:
                raise ExportError(
                    f"A checkpoint must hold every variable that the base graph reads. Received: {checkpoint.path} "
                    f"with {entries.get(place) or 'nothing'} for {bundle.name_of(key)!r}, which is {specs[key]} in the "
                    f"graph. Save with save_checkpoint(base=...), or export a checkpoint of the run that wrote the "
                    f"graph."
                )
        group: dict[str, str] = {}
        group_bytes = 0
        # Constants first, so that a changed one is reported before much is written.
        for key in sorted(wanted, key=lambda key: key not in constants):
            nbytes = _bytes_of(*specs[key])
            if nbytes > _GROUP_BYTES and len(boxes[wanted[key]]) > 1 and key not in constants:
                for box in boxes[wanted[key]]:
                    yield {key: _read_part(checkpoint, wanted[key], *specs[key], box)}
                continue
            if group and group_bytes + nbytes > _GROUP_BYTES:
                yield _read_group(checkpoint, group, specs)
                group, group_bytes = {}, 0
            group[key] = wanted[key]
            group_bytes += nbytes
        yield _read_group(checkpoint, group, specs)


def _read_group(checkpoint: ckpt.Checkpoint, group: Mapping[str, str], specs: Mapping[str, Any]) -> dict[str, Any]:
    tensors = bundle.read(checkpoint.weights, {place: specs[key][0] for key, place in group.items()})
    return {key: tensors[place] for key, place in group.items()}


def _read_part(checkpoint: ckpt.Checkpoint, place: str, dtype: str, shape: tuple[int, ...], box: Box) -> bundle.Part:
    return bundle.Part(shape, [box], bundle.read_boxes(checkpoint.weights, place, dtype, shape, [box]))


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    import tensorflow as tf

    return tf.as_dtype(dtype).size * math.prod(shape)


def _not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Returns the names of tensors with NaN or Inf, each with the number of such values."""
    import tensorflow as tf

    bad = []
    for key, value in tensors.items():
        value = value.values if isinstance(value, bundle.Part) else value
        if not (value.dtype.is_floating or value.dtype.is_complex):
            continue
        count, flat = 0, tf.reshape(value, [-1])
        for begin in range(0, len(flat), _SLICE):  # slices bound the size of intermediate results
            part = flat[begin : begin + _SLICE]
            # float8 has no is_finite kernel, and 16 bits overflow in sums; widening keeps NaN and Inf.
            part = (
                tf.abs(part) if value.dtype.is_complex else tf.cast(part, tf.float32) if value.dtype.size < 4 else part
            )
            # A finite sum proves finite values cheaply. Any other sum may have overflowed, so count.
            if not math.isfinite(float(tf.reduce_sum(part))):
                count += len(part) - int(tf.math.count_nonzero(tf.math.is_finite(part)))
        if count:
            bad.append(f"{bundle.name_of(key)} ({count} of {len(flat)})")
    return bad
