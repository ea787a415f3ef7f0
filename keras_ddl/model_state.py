"""Saves a Keras model's state to a checkpoint, and restores it.

checkpoint/model_keys.py says under which keys. Metrics are not saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from keras_ddl import checkpoint as ckpt
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.matching import dtype_of, match, table
from keras_ddl.checkpoint.model_keys import built_optimizers, keyed, named, optimizers_of, slots_of, weights_of
from keras_ddl.checkpoint.snapshot import GOLDEN, OPTIMIZER, WEIGHTS, Snapshot, by_bundle, tensor_of
from keras_ddl.compat.names import is_seed
from keras_ddl.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

    from keras_ddl.cut.values.layouts import Box
    from keras_ddl.strategy.shards.sharded_slots import ShardedVariable

__all__ = [
    "COMPLETE",
    "GOLDEN",
    "WEIGHTS",
    "build_optimizers",
    "golden_file",
    "is_seed",
    "keyed",
    "match",
    "named",
    "optimizers_to_build",
    "restore_checkpoint",
    "restore_complete",
    "save_checkpoint",
    "spread_variables",
    "table",
    "take",
    "take_parts",
    "tensor_of",
    "trackable",
    "weights_of",
]


def __dir__() -> list[str]:
    return sorted(__all__)


COMPLETE = "keras_variables"  # the attribute by which an export recognizes the object of `trackable`
_WHAT = "A checkpoint"
_GROUP_BYTES = 2**26
_ENTRY_BYTES = 16  # of the largest dtype, complex128


class Base(Protocol):
    """The methods of export.BaseGraph that `save_checkpoint` uses."""

    name: str | None  # the part of the model whose graph this is; None: the model itself

    def extra_variables(self) -> Mapping[str, Any]:
        """Returns, by key, variables that the graph reads but the model does not track."""

    def evidence(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns (arrays for golden.npz: sample rows and outputs, record for state.json), for the current weights."""


def save_checkpoint(
    model: Any,
    ckpt_dir: str | Path,
    step: int,
    epoch: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    *,
    monitor: str | None = None,
    mode: str = "auto",
    optimizer: bool = True,
    base: Base | Sequence[Base] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ckpt.Checkpoint:
    """Writes weights, BatchNormalization statistics, seeds and optimizer state to `ckpt_dir/ckpt-<step>/`, atomically.

    Call it in one process (rank 0); it is not collective. The result does not depend on the Strategy.

    Args:
        model: a built keras.Model.
        step: number of optimizer steps, which names the checkpoint; a checkpoint of the same step is replaced.
        epoch: number of finished epochs, which is the `initial_epoch` of a resumed fit.
        metrics: name -> number, for choosing the best checkpoint.
        monitor, mode: the default metric of 'best', and 'min', 'max' or 'auto'.
        optimizer: also save the optimizer's variables (if the model has a built optimizer).
        base: the result of export.write_base_graph in this process; adds the golden outputs that an export compares
            with, and a record of whether graph and live model have equal outputs. A list, if several parts are
            exported.
        extra: JSON values to be returned by `restore_checkpoint`.
    Returns: the written checkpoint.
    Raises: CheckpointError: the model is not built, the directory is not writable, or the disk is full. No partial
        checkpoint is left.
    Cost: one write and one read (SHA-256) of the state; with `base`, two forward passes of the sample.
    """
    snapshot = take(model, optimizer=optimizer, base=base)
    return ckpt.write(
        ckpt_dir, step, snapshot.fill, epoch=epoch, metrics=metrics, monitor=monitor, mode=mode, extra=extra
    )


def take(
    model: Any,
    *,
    optimizer: bool = True,
    base: Base | Sequence[Base] | None = None,
    evidence: bool = True,
    parts: Mapping[str, bundle.Part | None] | None = None,
) -> Snapshot:
    """Returns a snapshot of a model's state, to be written by `ckpt.write(..., snapshot.fill)`; training may continue.

    Args:
        optimizer, base: as in `save_checkpoint`.
        evidence: whether `base` adds golden outputs, besides its variables.
        parts: what `take_parts` returned, by the keys of `spread_variables`. None: each variable is read in full.
    Raises: CheckpointError: the model is not built, or has no weights.
    """
    from keras_ddl.compat.optimizers import trained_variables  # an export reads checkpoints without Keras

    variables = weights_of(model)
    if not variables:
        raise CheckpointError(
            f"A checkpoint needs a model with weights. Received: {model.name!r}, which has no weights."
        )
    built = built_optimizers(model) if optimizer else {}
    slots = slots_of(built)
    bases = [] if base is None else list(base) if isinstance(base, Sequence) else [base]
    proofs = {each.name: each.evidence() for each in bases} if evidence else {}

    weights, state_of_optimizers = (
        {key: tensor_of(variable) for key, variable in some.items() if key not in (parts or {})}
        for some in (variables, slots)
    )
    for each in bases:
        weights.update({key: tensor_of(variable) for key, variable in each.extra_variables().items()})
    for values, all_keys in ((weights, {*variables, *weights}), (state_of_optimizers, {*slots})):
        if all_keys:
            values[bundle.GRAPH] = bundle.object_graph(sorted(all_keys))
    names = {id(variable): key for key, variable in variables.items()}
    trained = {name: trained_variables(each) or () for name, each in built.items()}
    return Snapshot(
        {WEIGHTS: weights, OPTIMIZER: state_of_optimizers},
        by_bundle(parts or {}),
        {golden_file(name): golden for name, (golden, _) in proofs.items()},
        record={
            "weights": table(variables),
            "optimizer": table(slots) if slots else None,
            # With the variables that each was built for: a resumed run must build those that Keras does not.
            "optimizers": [
                [name, len(each.variables), [names.get(id(variable)) for variable in trained[name]]]
                for name, each in built.items()
            ],
            "base": dict(proofs[None][1]) if None in proofs else {},
            "bases": {name: dict(record) for name, (_, record) in proofs.items() if name is not None},
        },
    )


def spread_variables(model: Any) -> dict[str, ShardedVariable]:
    """Returns key -> variable, of the variables of a model and its built optimizers that are spread over ranks.

    Their order is the same on all ranks; the numbers in the keys may differ.
    """
    from keras_ddl.strategy.shards.sharded_slots import sharded_variable  # an export reads checkpoints without Keras

    variables = {**weights_of(model), **slots_of(built_optimizers(model))}
    return {key: spread for key, each in variables.items() if (spread := sharded_variable(each)) is not None}


def take_parts(model: Any, reached: Sequence[bool]) -> list[bundle.Part | None]:
    """Returns this rank's part of each of `spread_variables`, to write it. COLLECTIVE if a rank cannot reach the files.

    reached: which ranks reach the files, as `files.reaching` returns.
    """
    import tensorflow as tf

    from keras_ddl.state import files

    parts: list[bundle.Part | None] = []
    for variable in spread_variables(model).values():
        boxes, values = files.write(variable, reached, in_boxes=variable.dtype.name in bundle.DTYPES_IN_PARTS)
        if isinstance(values, int):
            values = variable.share.variables[values].read_value()
        with tf.device("CPU:0"):
            parts.append(bundle.Part(variable.full_shape, boxes, tf.convert_to_tensor(values)) if boxes else None)
    return parts


def golden_file(name: str | None) -> str:
    """Returns the file of golden outputs of the model, or of the part of that name."""
    return GOLDEN if name is None else GOLDEN.replace(".", f"-{name}.")


def restore_checkpoint(
    model: Any,
    ckpt_dir: str | Path,
    which: str | int = "latest",
    *,
    optimizer: bool = True,
    seeds: str = "all",
    metric: str | None = None,
) -> ckpt.Checkpoint:
    """Restores a checkpoint into a built, compiled model: training continues as if it had not stopped.

    Every rank may call it, because it only reads. Alternatively, rank 0 calls it and broadcasts the result, unless
    variables are spread over ranks, because each rank reads only its own part of such variables. All names, shapes and
    dtypes are compared before the first variable is changed.

    Args:
        which: 'latest', 'best' (by `metric`, default the monitored one) or a step.
        optimizer: also restore the optimizer's variables, and build the optimizer if needed.
        seeds: whether to restore seed generators (dropout, random layers): 'all' or 'none'.
    Returns: the checkpoint, with its `step`, `epoch` (finished epochs: pass as initial_epoch), `metrics`, `extra`.
    Raises: CheckpointError: there is no such checkpoint, it is damaged, or it is of another model (names the first
        variable that differs).
    """
    checkpoint, sources = restore_complete(model, ckpt_dir, which, optimizer=optimizer, seeds=seeds, metric=metric)
    spread = spread_variables(model)
    for target, (name, key) in sources.items():
        variable, prefix = spread[target], str(checkpoint.path / name)
        variable.restore([read_boxes(prefix, key, variable, boxes) for boxes in variable.held()])
        variable.note_restored(f"{prefix} {key}")
    return checkpoint


def restore_complete(
    model: Any,
    ckpt_dir: str | Path,
    which: str | int = "latest",
    *,
    optimizer: bool = True,
    seeds: str = "all",
    metric: str | None = None,
) -> tuple[ckpt.Checkpoint, dict[str, tuple[str, str]]]:
    """Restores all variables except variables that are spread over ranks.

    Arguments and errors are as for `restore_checkpoint`.

    Returns: the checkpoint, and a dict key -> (bundle, key in the bundle) of the `spread_variables` that it has.
    """
    from keras_ddl.ops.variables import in_groups  # an export reads checkpoints without them

    if seeds not in ("all", "none"):
        raise CheckpointError(f"seeds must be 'all' or 'none'. Received: seeds={seeds!r}.")
    checkpoint = ckpt.find(ckpt_dir, which, metric)
    ckpt.validate(checkpoint)
    state = checkpoint.state or {}
    has_optimizers = optimizer and bool(optimizers_of(model))
    if has_optimizers:
        if state["optimizer"] is None:
            raise CheckpointError(
                f"An exact resume needs the optimizer's state. Received: {checkpoint.path}, which holds weights only. "
                "Pass optimizer=False to start with a new optimizer."
            )
        build_optimizers(model, optimizers_to_build(model, checkpoint))
    spread, spread_sources = spread_variables(model), {}
    for name, targets, source in _sources(model, checkpoint, optimizer=has_optimizers):
        if seeds == "none":
            source = {target: key for target, key in source.items() if not is_seed(targets[target])}
        spread_sources.update({target: (name, key) for target, key in source.items() if target in spread})
        complete = [each for each in source if each not in spread]
        prefix = str(checkpoint.path / name)
        with bundle.translated(_WHAT, prefix, CheckpointError):
            # In groups, because a group's values are in memory twice.
            for group in in_groups(
                complete, [math.prod(targets[key].shape) * _ENTRY_BYTES for key in complete], _GROUP_BYTES
            ):
                values = bundle.read(prefix, {source[target]: dtype_of(targets[target]) for target in group})
                for target in group:
                    targets[target].assign(values.pop(source[target]))
    return checkpoint, spread_sources


def read_boxes(prefix: str, key: str, variable: ShardedVariable, boxes: Sequence[Box]) -> np.ndarray:
    """Returns the entries of boxes of a variable in a bundle, one box after the other: a vector.

    Raises: CheckpointError: they cannot be read.
    """
    import numpy as np

    with bundle.translated(_WHAT, prefix, CheckpointError):
        return np.asarray(bundle.read_boxes(prefix, key, variable.dtype.name, variable.full_shape, boxes))


def trackable(model: Any) -> Any:
    """Returns an object with all variables of a built model, for `tf.train.Checkpoint(model=trackable(model), ...)`.

    tf.train.Checkpoint of a Keras 3.15 model itself silently omits layers in lists, dicts and nested tuples. Given this
    object instead, it saves and restores all layers; `keras-ddl export --weights` takes such files.
    Raises: CheckpointError: the model is not built.
    """
    import tensorflow as tf

    module = tf.Module()
    setattr(module, COMPLETE, list(weights_of(model).values()))
    return module


def optimizers_to_build(model: Any, checkpoint: ckpt.Checkpoint) -> list[tuple[str, list[int] | None]]:
    """Returns (name, positions of its variables in `weights_of(model)`) of a checkpoint's unbuilt optimizers.

    Optimizers that are built here are left out. Positions None: the model's trainable variables.

    Raises: CheckpointError: the model does not have such an optimizer.
    """
    state = checkpoint.state or {}
    variables, stored = weights_of(model), state["weights"]
    place = {
        key: number for number, key in enumerate(match(table(variables), stored, "weight", checkpoint.path).values())
    }
    optimizers = optimizers_of(model)
    unbuilt: list[tuple[str, list[int] | None]] = []
    for name, _, keys in state["optimizers"]:
        if name not in optimizers:
            raise CheckpointError(
                f"The model must have the checkpoint's optimizers. Received: {checkpoint.path} with {name!r}; the "
                f"model has {sorted(optimizers)}. Create it as an attribute of the model, or pass optimizer=False to "
                "start with new ones."
            )
        if not optimizers[name].built:
            known = keys and all(key in place for key in keys)
            unbuilt.append((name, [place[key] for key in keys] if known else None))
    return unbuilt


def build_optimizers(model: Any, plan: Sequence[tuple[str, Sequence[int] | None]]) -> None:
    """Builds the optimizers that `optimizers_to_build` returned on this or another rank."""
    optimizers, variables = optimizers_of(model), list(weights_of(model).values())
    for name, positions in plan:
        if not optimizers[name].built:
            chosen = model.trainable_variables if positions is None else [variables[each] for each in positions]
            with model.distribute_strategy.scope():
                optimizers[name].build(chosen)


def _sources(
    model: Any, checkpoint: ckpt.Checkpoint, *, optimizer: bool
) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    """Returns (bundle, variables by key, key -> key in the bundle) of the weights, and of the optimizers."""
    state, variables = checkpoint.state or {}, weights_of(model)
    weights = match(table(variables), state["weights"], "weight", checkpoint.path)
    sources = [(WEIGHTS, variables, weights)]
    if optimizer:
        optimizers = optimizers_of(model)
        slots = keyed(OPTIMIZER, [v for name, _, _ in state["optimizers"] for v in optimizers[name].variables])
        stored = match(table(slots), state["optimizer"], "optimizer variable", checkpoint.path)
        sources.append((OPTIMIZER, slots, stored))
    return sources
