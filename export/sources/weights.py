"""The weights that an export takes: from a checkpoint of keras_ddl or a file, checked before they are used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl import checkpoint as ckpt
from keras_ddl import model_state
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.errors import ExportError
from keras_ddl.export.manifest import Manifest
from keras_ddl.export.sources import weight_files
from keras_ddl.files import digests

_WHAT = "An export"
_MOST = 5
_GROUP_BYTES = 2**29
_SLICE = 2**24  # elements


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


def read(source: Source, base: Manifest) -> Iterator[dict[str, Any]]:
    """Yields all that the graph reads, base key -> tensor, in groups of half a gigabyte, or of one larger tensor.

    A caller that lets each group go before it takes the next holds no more than one of a checkpoint's; files of other
    kinds are read whole.
    Raises: ExportError: at the first group: a variable is missing or of another dtype or shape, or something that the
        graph holds as a constant was moved by training; after the last: some hold NaN or Inf.
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
                    f"What the base graph holds as a constant must not change in training. Received: "
                    f"{bundle.name_of(key)!r} in {source.name} differs from when the graph was traced. Call adapt() "
                    f"before fit(), or save checkpoints with base=, which tells whether it matters."
                )
        bad += _not_finite(group)
        yield group
        del group  # else it would be held while the next one is read
    if bad:
        more = f" and {len(bad) - _MOST} more" if len(bad) > _MOST else ""
        raise ExportError(
            f"Weights must be finite numbers to be served. Received: NaN or Inf in {source.name}: "
            f"{', '.join(bad[:_MOST])}{more}. Export an earlier step, and look for the divergence in training."
        )


def _agreement(source: Source, name: str | None) -> bool | None:
    """Whether live model and base graph gave the same answers when the weights were saved. Raises: ExportError: no."""
    if source.checkpoint is None:
        return None
    state = source.checkpoint.state or {}
    evidence = (state.get("base") if name is None else state.get("bases", {}).get(name)) or {}
    if evidence.get("agrees") is False:
        raise ExportError(
            f"The base graph must give the model's outputs as of step {source.step}. Received: "
            f"{'; '.join(evidence['problems'])}. Something that the graph holds as a constant was changed after "
            f"training began (an attribute of a layer, an adapt()). Set it before fit(), or make it a weight."
        )
    return evidence.get("agrees")


def _from_checkpoint(found: ckpt.Checkpoint, base: Manifest, constants: list[str]) -> Iterator[dict[str, Any]]:
    stored = model_state.match(base["variables"], (found.state or {})["weights"], "weight", found.path)
    specs = {key: (dtype, tuple(shape)) for key, dtype, shape in [*base["variables"], *base["untracked"]]}
    wanted = {key: stored[key] for key in [*base["captured"], *constants]}
    wanted |= {key: key for key, _, _ in base["untracked"]}
    with bundle.translated(_WHAT, found.path, ExportError):
        held = bundle.entries(found.weights)
        for key, place in wanted.items():
            if held.get(place) != specs[key]:
                raise ExportError(
                    f"A checkpoint must hold every variable that the base graph reads. Received: {found.path} with "
                    f"{held.get(place) or 'nothing'} for {bundle.name_of(key)!r}, which is {specs[key]} in the graph. "
                    f"Save with save_checkpoint(base=...), or export a checkpoint of the run that wrote the graph."
                )
        group: dict[str, str] = {}
        held_bytes = 0
        # Constants first: one that has changed is told before much is written.
        for key in sorted(wanted, key=lambda key: key not in constants):
            nbytes = _bytes_of(*specs[key])
            if group and held_bytes + nbytes > _GROUP_BYTES:
                yield _read_group(found, group, specs)
                group, held_bytes = {}, 0
            group[key] = wanted[key]
            held_bytes += nbytes
        yield _read_group(found, group, specs)


def _read_group(found: ckpt.Checkpoint, group: Mapping[str, str], specs: Mapping[str, Any]) -> dict[str, Any]:
    tensors = bundle.read(found.weights, {place: specs[key][0] for key, place in group.items()})
    return {key: tensors[place] for key, place in group.items()}


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    import tensorflow as tf

    return tf.as_dtype(dtype).size * math.prod(shape)


def _not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Returns the names of those that hold NaN or Inf, and how many of them."""
    import tensorflow as tf

    bad = []
    for key, value in tensors.items():
        if not (value.dtype.is_floating or value.dtype.is_complex):
            continue
        count, flat = 0, tf.reshape(value, [-1])
        for begin in range(0, len(flat), _SLICE):  # in slices: the intermediate results of a large one are large
            part = flat[begin : begin + _SLICE]
            # float8 has no is_finite kernel, and 16 bits overflow in sums; widening keeps NaN and Inf.
            part = (
                tf.abs(part) if value.dtype.is_complex else tf.cast(part, tf.float32) if value.dtype.size < 4 else part
            )
            # A sum is quick. It is finite if all are; if not, it may have overflowed.
            if not math.isfinite(float(tf.reduce_sum(part))):
                count += len(part) - int(tf.math.count_nonzero(tf.math.is_finite(part)))
        if count:
            bad.append(f"{bundle.name_of(key)} ({count} of {len(flat)})")
    return bad
