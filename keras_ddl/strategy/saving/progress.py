"""Saves and restores a run's state other than its variables, for an exact resume.

The state is the position in the data, random numbers, the current epoch's metrics, and the state of other callbacks.

`capture` returns JSON and arrays for a checkpoint. `Restoration` restores each part at a moment when Keras no longer
overwrites it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.first_rank import is_first_rank
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, KerasDdlError
from keras_ddl.files import foreign
from keras_ddl.state import callback_state
from keras_ddl.state.plan import MissingBoxError
from keras_ddl.strategy.agreement.training_state import gather
from keras_ddl.strategy.calls import fits
from keras_ddl.strategy.shards import gathered_slots, kept_weights

RECORD = "progress.json"
ARRAYS = "progress.npz"
# Metric states that are combined across ranks in other ways than by a sum.
_TOGETHER = {
    "mean": lambda values: values.astype(np.float64).mean(axis=0),
    "equal": lambda values: values[0],
}


def capture(
    model: Any, others: Sequence[Any], epochs: int, batches: int, logs: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (JSON, key -> array) of a run after `epochs` epochs and `batches` batches. COLLECTIVE.

    Only rank 0's result is valid. Within an epoch, the result includes each rank's own metrics, layer state and logs.
    """
    reading = fits.reading_of(model)
    generator = keras_compat.global_seed_generator()
    record: dict[str, Any] = {
        "ranks": communicator.size() if communicator.is_initialized() else 1,
        "data": reading.position(epochs, batches) if reading is not None else None,
        "seed": generator.state.numpy().tolist() if generator is not None else None,
        "callbacks": callback_state.for_checkpoint(others),
    }
    # No copies: EarlyStopping replaces these arrays and never writes into them. NumPy's files cannot hold bfloat16.
    arrays = {
        key: array.astype(np.float32) if array.dtype.kind == "V" else array
        for key, array in _best_weights(model, others).items()
    }
    if batches:
        # The program's own train_step may return nested dicts, as Keras's compiled metrics do.
        leaves = {key: tf.nest.flatten(value) for key, value in (logs or {}).items()}
        scalars = [key for key, values in leaves.items() if all(np.ndim(each) == 0 for each in values)]
        numbers = {key: tf.nest.map_structure(float, (logs or {})[key]) for key in scalars}
        variables = [
            (f"{part}/{number}", variable)
            for part, variables_of_part in models.metric_variables_by_part(model).items()
            for number, variable in enumerate(variables_of_part)
        ]
        mine = (numbers, {key: variable.numpy() for key, variable in variables})
        # Under a Strategy, metrics are global and equal on all ranks.
        shared = keras_compat.strategy_of(model) is not None
        gathered = [mine] if shared else gather(mine, "metrics")
        record["logs"] = [theirs for theirs, _ in gathered]
        record["metrics"] = {key: "equal" if shared else _way_of(variable) for key, variable in variables}
        for rank, (_, states) in enumerate(gathered):
            arrays.update({f"metrics/{rank}/{key}": state for key, state in states.items()})
    return record, arrays


def read_progress(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the result of `capture` for a checkpoint, or None if the checkpoint has no such state."""
    if not (folder / RECORD).exists():
        return None
    arrays = {}
    if (folder / ARRAYS).exists():
        with np.load(folder / ARRAYS) as archive:
            arrays = {name: archive[name] for name in archive.files}
    return foreign.read_json(folder, RECORD), arrays


class Restoration:
    """Restores the result of `capture`. Create it on every rank with equal arguments, including all ranks' `arrays`."""

    def __init__(self, model: Any, record: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        self._model, self._record, self._arrays = model, record, arrays
        self._same_ranks = record["ranks"] == (communicator.size() if communicator.is_initialized() else 1)
        self._rank = communicator.rank() if communicator.is_initialized() else 0
        self._awaited: set[str] = set()  # parts of the metrics still to be restored

    def at_train_begin(self) -> None:
        """Restores the position in the data, and random state that is not in the model's variables."""
        reading = fits.reading_of(self._model)
        if reading is not None and self._record["data"] is not None:
            reading.go_to(self._record["data"])
        if self._record["seed"] is not None:
            keras_compat.make_global_seed_generator().state.assign(self._record["seed"])

    def at_epoch_begin(self, others: Sequence[Any]) -> None:
        """Restores, before the first epoch, the state that fit and the other callbacks' on_train_begin have reset."""
        callbacks = callback_state.with_state(others)
        callback_state.set_states(callbacks, self._record["callbacks"])
        for name, one in callbacks.items():
            weights = self._under(f"callbacks/{name}/")
            if weights:
                model_weights = self._model.weights
                is_for_it = len(model_weights) == len(weights)
                one.best_weights = list(map(kept_weights.part_of, model_weights, weights)) if is_for_it else weights
        logs = self._record.get("logs")
        if logs is not None:
            fit = fits.of(self._model)
            if fit is not None:
                fit.logs_before = logs[self._place(len(logs))]
            self._restore_metrics()
        if self._same_ranks:
            layers = models.layer_state(self._model)
            for key, value in self._arrays.items():
                kind, rank, number = key.split("/", 2)
                if kind == "layers" and int(rank) == self._rank:
                    layers[int(number)].assign(value)

    def at_test_begin(self) -> None:
        """Drops the state of metrics that no training step has created yet, so that an evaluation does not get it."""
        self._awaited.clear()

    def _restore_metrics(self) -> None:
        """Restores existing metrics now, and compile()'s metrics when the first step creates them."""
        compiled = models.compiled_parts(self._model)
        self._awaited = {"own", *compiled}
        self._restore_part("own")
        for part, built in compiled.items():
            models.after_build(built, functools.partial(self._restore_part, part))

    def _restore_part(self, part: str) -> None:
        """Restores each rank's own metrics; if the number of ranks has changed, rank 0 gets the combined state."""
        if part not in self._awaited:
            return
        self._awaited.discard(part)
        variables = models.metric_variables_by_part(self._model)[part]
        states = [self._under(f"metrics/{rank}/{part}/") for rank in range(len(self._record["logs"]))]
        if [tuple(v.shape) for v in variables] != [v.shape for v in states[0]]:
            if is_first_rank():
                stack_position.warn(
                    "An epoch resumed in the middle continues with the metrics of its first part. Received: "
                    f"{len(variables)} metric variables here, {len(states[0])} in the checkpoint ({part} of the "
                    "model). The logs of this epoch cover only its second part."
                )
            return
        with tf.init_scope():  # a model's first step is being traced
            for number, variable in enumerate(variables):
                variable.value.assign(self._state_of(states, f"{part}/{number}", number).astype(variable.dtype))

    def _state_of(self, states: Sequence[Sequence[Any]], key: str, number: int) -> Any:
        if self._same_ranks or len(states) == 1:
            return states[self._place(len(states))][number]
        way, values = self._record["metrics"][key], np.stack([theirs[number] for theirs in states])
        if way != "sum":
            return _TOGETHER[way](values)
        return values.sum(axis=0, dtype=values.dtype) if self._rank == 0 else np.zeros_like(values[0])

    def _place(self, count: int) -> int:
        return self._rank if self._same_ranks and self._rank < count else 0

    def _under(self, prefix: str) -> list[Any]:
        arrays = {int(key[len(prefix) :]): value for key, value in self._arrays.items() if key.startswith(prefix)}
        return [arrays[number] for number in sorted(arrays)]


def _way_of(variable: Any) -> str:
    """Returns how the ranks' states of a metric are combined: "sum", "mean" or "equal"."""
    return {"mean": "mean", "only_first_replica": "equal"}.get(variable.aggregation, "sum")


def _best_weights(model: Any, others: Sequence[Any]) -> dict[str, Any]:
    """Returns key -> array for weights that callbacks keep; complete on rank 0.

    COLLECTIVE if weights of the model are spread over the ranks; these are gathered one by one.
    """
    best = {
        f"callbacks/{name}/{number}": value
        for name, one in callback_state.with_state(others).items()
        for number, value in enumerate(getattr(one, "best_weights", None) or ())
    }
    if others and gathered_slots.spread_in(model.variables):
        complete, lost = communicator.as_one_each(lambda: _gathered(best), "Checkpoint/best_weights/all")
        best = {key: complete.get(key, value) for key, value in best.items() if key.rpartition("/")[0] not in lost}
    return {key: value for key, value in best.items() if value is not None}


def _gathered(best: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Returns the complete arrays of kept weights, by key; None on ranks other than rank 0. COLLECTIVE.

    Also returns the callbacks that lost a part with a rank; this checkpoint has none of their weights.
    """
    mine = {key: value for key, value in best.items() if isinstance(value, kept_weights.KeptWeight)}
    everyone = communicator.all_gather_object(
        {key: each.held() for key, each in mine.items()}, "Checkpoint/best_weights"
    )
    complete, lost = dict[str, Any](), set[str]()
    for key in dict.fromkeys(key for keys in everyone for key in keys):
        ranks = [rank for rank, keys in enumerate(everyone) if key in keys]
        if len(ranks) < len(everyone):
            raise ConfigError(
                "A callback that keeps weights that are spread over the ranks must run on every rank. Received: "
                f"{key.split('/')[1]} on rank(s) {ranks} only (rank {communicator.rank()}). Pass the callback to fit "
                "on all ranks."
            )
        try:
            complete[key] = kept_weights.complete(mine[key], [keys[key] for keys in everyone], f"Checkpoint/{key}")
        except MissingBoxError:
            lost.add(key.rpartition("/")[0])
    return complete, lost


def build_for_data(model: Any) -> None:
    """Builds a model under a Strategy before its first step, by calling it on symbolic inputs like fit's data."""
    reading = fits.reading_of(model)
    if models.is_built(model) or reading is None or keras_compat.strategy_of(model) is None:
        return
    x = reading.iterator.element_spec
    x = x[0] if isinstance(x, tuple) else x
    specs = tf.nest.flatten(x)
    if not all(isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None for spec in specs):
        return
    symbols = [keras.KerasTensor(tuple(each.shape), keras.backend.standardize_dtype(each.dtype)) for each in specs]
    try:
        with model.distribute_strategy.scope():
            model(tf.nest.pack_sequence_as(x, symbols))
    except KerasDdlError:
        raise
    except Exception:  # a model's code may fail in any way; the caller reports that the model is not built
        return
