"""Saves a Keras model's state to a checkpoint, and restores it.

Weights are stored under `weights/<path of the Keras variable>`. The base graph's variables have the same keys, so an
export copies key by key and needs neither Keras nor the model's code. Metrics are not saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from keras_ddl import checkpoint as ckpt
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.snapshot import GOLDEN, OPTIMIZER, WEIGHTS, Snapshot, tensor_of
from keras_ddl.errors import CheckpointError

__all__ = [
    "COMPLETE",
    "GOLDEN",
    "WEIGHTS",
    "build_optimizers",
    "golden_file",
    "is_seed",
    "match",
    "named",
    "optimizers_to_build",
    "restore_checkpoint",
    "save_checkpoint",
    "table",
    "take",
    "tensor_of",
    "trackable",
    "weights_of",
]

COMPLETE = "keras_variables"  # the attribute by which an export recognizes the object of `trackable`
_SEED = "seed_generator_state"
_WHAT = "A checkpoint"

Table = Sequence[Sequence[Any]]  # rows [key, dtype name, shape]


class Base(Protocol):
    """The part of export.BaseGraph that `save_checkpoint` uses."""

    name: str | None  # the part of the model whose graph this is; None: the model itself

    def extra_variables(self) -> Mapping[str, Any]:
        """Returns variables that the graph reads and the model does not track, by key."""

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
        step: number of optimizer steps, which names the checkpoint; one of the same step is replaced.
        epoch: number of finished epochs, which is the `initial_epoch` of a resumed fit.
        metrics: name -> number, for choosing the best checkpoint.
        monitor, mode: the default metric of 'best', and 'min', 'max' or 'auto'.
        optimizer: also save the optimizer's variables (if the model has a built optimizer).
        base: the result of export.write_base_graph in this process; adds the golden outputs that an export compares
            with, and a record of whether graph and live model have equal outputs. A list for several parts.
        extra: JSON values to be returned by `restore_checkpoint`.
    Returns: the checkpoint written.
    Raises: CheckpointError: the model is not built; not writable; disk full. No partial checkpoint is left.
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
) -> Snapshot:
    """Returns a snapshot of a model's state, to be written by `ckpt.write(..., snapshot.fill)`; training may continue.

    Args:
        optimizer, base: as in `save_checkpoint`.
        evidence: whether `base` adds golden outputs, besides its variables.
    Raises: CheckpointError: the model is not built, or has no weights.
    """
    from keras_ddl.compat.optimizers import trained_variables  # an export reads checkpoints without Keras

    variables = weights_of(model)
    if not variables:
        raise CheckpointError(f"A checkpoint needs weights. Received: {model.name!r}, which has no weights.")
    built = {name: each for name, each in _optimizers_of(model).items() if each.built} if optimizer else {}
    slots = _keyed(OPTIMIZER, [variable for each in built.values() for variable in each.variables])
    bases = [] if base is None else list(base) if isinstance(base, Sequence) else [base]
    proofs = {each.name: each.evidence() for each in bases} if evidence else {}

    weights = {key: tensor_of(variable) for key, variable in variables.items()}
    for each in bases:
        weights.update({key: tensor_of(variable) for key, variable in each.extra_variables().items()})
    names = {id(variable): key for key, variable in variables.items()}
    trained = {name: trained_variables(each) or () for name, each in built.items()}
    return Snapshot(
        {WEIGHTS: weights, OPTIMIZER: {key: tensor_of(variable) for key, variable in slots.items()}},
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

    Every rank may call it (it only reads); or rank 0 calls it and broadcasts. All names, shapes and dtypes are compared
    before the first variable is changed.

    Args:
        which: 'latest', 'best' (by `metric`, default the monitored one) or a step.
        optimizer: also restore the optimizer's variables, and build the optimizer if needed.
        seeds: whether to restore seed generators (dropout, random layers): 'all' or 'none'.
    Returns: the checkpoint, with its `step`, `epoch` (finished epochs: pass as initial_epoch), `metrics`, `extra`.
    Raises: CheckpointError: no such checkpoint, damaged, or of another model (names the first variable that differs).
    """
    if seeds not in ("all", "none"):
        raise CheckpointError(f"seeds must be 'all' or 'none'. Received: {seeds!r}.")
    checkpoint = ckpt.find(ckpt_dir, which, metric)
    ckpt.validate(checkpoint)
    path, state = checkpoint.path, checkpoint.state or {}
    variables = weights_of(model)
    pairs = [(checkpoint.weights, variables, match(table(variables), state["weights"], "weight", path))]
    if optimizer and _optimizers_of(model):
        if state["optimizer"] is None:
            raise CheckpointError(
                f"An exact resume needs the optimizer's state. Received: {path}, which holds weights only. Pass "
                f"optimizer=False to start with a new optimizer."
            )
        build_optimizers(model, optimizers_to_build(model, checkpoint))
        optimizers = _optimizers_of(model)
        targets = _keyed(OPTIMIZER, [v for name, _, _ in state["optimizers"] for v in optimizers[name].variables])
        source = match(table(targets), state["optimizer"], "optimizer variable", path)
        pairs.append((checkpoint.optimizer, targets, source))
    for prefix, targets, source in pairs:
        with bundle.translated(_WHAT, prefix, CheckpointError):
            values = bundle.read(prefix, {key: _dtype(targets[target]) for target, key in source.items()})
        for target, key in source.items():
            if seeds == "all" or not is_seed(targets[target]):
                targets[target].assign(values[key])
    return checkpoint


def weights_of(model: Any) -> dict[str, Any]:
    """Returns key -> Keras variable of all weights and seed states of a model, in Keras's order, each once.

    If several variables share a path, '#2', '#3'... are appended in that order.
    """
    from keras_ddl.compat.models import is_built  # an export reads checkpoints without Keras

    if not is_built(model):
        raise CheckpointError(
            f"Only a built model has weights. Received: {type(model).__name__} {model.name!r}, not built yet. Call it "
            "on a batch, or give it an Input, first."
        )
    return _keyed(WEIGHTS, model.variables)


def trackable(model: Any) -> Any:
    """Returns an object with all variables of a built model, for `tf.train.Checkpoint(model=trackable(model), ...)`.

    tf.train.Checkpoint of a Keras 3.15 model itself silently omits layers in lists, dicts and nested tuples. With this
    object instead it saves and restores all; `keras-ddl export --weights` takes such files.
    Raises: CheckpointError: the model is not built.
    """
    import tensorflow as tf

    module = tf.Module()
    setattr(module, COMPLETE, list(weights_of(model).values()))
    return module


def optimizers_to_build(model: Any, checkpoint: ckpt.Checkpoint) -> list[tuple[str, list[int] | None]]:
    """Returns (name, positions of its variables in `weights_of(model)`) of every optimizer in a checkpoint that is not
    built here; positions None: the model's trainable variables.

    Raises: CheckpointError: the model does not have such an optimizer.
    """
    state = checkpoint.state or {}
    variables, stored = weights_of(model), state["weights"]
    place = {
        key: number for number, key in enumerate(match(table(variables), stored, "weight", checkpoint.path).values())
    }
    optimizers = _optimizers_of(model)
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
    """Builds the optimizers of `optimizers_to_build`, which was called on this or another rank."""
    optimizers, variables = _optimizers_of(model), list(weights_of(model).values())
    for name, positions in plan:
        if not optimizers[name].built:
            chosen = model.trainable_variables if positions is None else [variables[each] for each in positions]
            with model.distribute_strategy.scope():
                optimizers[name].build(chosen)


def _optimizers_of(model: Any) -> dict[str, Any]:
    from keras_ddl.compat.models import named_optimizers_of  # an export reads checkpoints without Keras

    return named_optimizers_of(model)


def match(targets: Table, stored: Table, what: str, source: Path | str) -> dict[str, str]:
    """Returns target key -> stored key for every row of `targets`.

    Keras's numbers in names differ between processes (`dense_7` may have been `dense`), and so may the scopes before
    them. If keys differ, the order decides, provided that the ends of the names (layer and weight, or the optimizer's
    slot) without numbers, the dtypes and the shapes agree throughout.
    Raises: CheckpointError: they do not agree; names the first difference.
    """
    here = {key: (dtype, tuple(shape)) for key, dtype, shape in targets}
    there = {key: (dtype, tuple(shape)) for key, dtype, shape in stored}
    if set(here) == set(there):
        pairs = {key: key for key in here}
    else:
        pairs = dict(zip(here, there))
        differs = next((pair for pair in pairs.items() if _end_of_name(pair[0]) != _end_of_name(pair[1])), None)
        if len(here) != len(there) or differs:
            where = (
                f"{bundle.name_of(differs[1])} there, {bundle.name_of(differs[0])} here"
                if differs
                else "one list ends early"
            )
            _other_model(source, f"{len(there)} {what}s there, {len(here)} here; first difference: {where}")
    for target, key in pairs.items():
        if here[target] != there[key]:
            _other_model(source, f"{bundle.name_of(target)} is {_show(there[key])} there, {_show(here[target])} here")
    return pairs


def table(variables: Mapping[str, Any]) -> Table:
    """Returns [key, dtype name, shape] of each variable, in order, for `match` and state.json."""
    return [[key, _dtype(variable), list(variable.shape)] for key, variable in variables.items()]


def is_seed(variable: Any) -> bool:
    """Whether a Keras variable is the state of a seed generator."""
    return bool(variable.path.endswith(_SEED))


def named(variables: Sequence[Any]) -> dict[str, Any]:
    """Returns name -> variable, each once, in order. The name is the Keras path, with '#2', '#3'... if it repeats."""
    names: dict[str, Any] = {}
    times: dict[str, int] = {}
    for variable in {id(variable): variable for variable in variables}.values():
        path = variable.path
        times[path] = times.get(path, 0) + 1
        names[path if times[path] == 1 else f"{path}#{times[path]}"] = variable
    return names


def _keyed(prefix: str, variables: Sequence[Any]) -> dict[str, Any]:
    return {bundle.variable_key(prefix, name): variable for name, variable in named(variables).items()}


def _dtype(variable: Any) -> str:
    import tensorflow as tf

    return str(tf.as_dtype(variable.dtype).name)


def _end_of_name(key: str) -> str:
    parts = 2 if key.startswith(WEIGHTS) else 1
    return re.sub(r"_\d+(?=/|_|$)", "", "/".join(bundle.name_of(key).split("/")[-parts:]))


def _show(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]}{list(spec[1])}"


def _other_model(source: Path | str, difference: str) -> None:
    raise CheckpointError(
        f"A checkpoint must be restored into the model it was saved from. Received: {source} of another model: "
        f"{difference}. Build the same model, or give another checkpoint."
    )
