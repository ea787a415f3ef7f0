"""The table of what a Strategy replaces in Keras: how fit reads, calls back and saves. None of it is mathematics.

They are installed when the first Strategy is made. Each asks whether the model at hand belongs to a keras_ddl.Strategy
and otherwise does what Keras does. A version of Keras they were not written for is a warning, and one that lacks
something that they replace is refused. None changes what is computed: losses, metrics, optimizers and layers are as
Keras made them.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from keras_ddl.communicator import stack_position
from keras_ddl.compat.keras import (
    TESTED,
    BaseOptimizer,
    TFOptimizer,
    TFTrainer,
    TFVariable,
    Trainer,
    io_utils,
    keras,
    legacy_h5_format,
    saving_lib,
    tf_trainer,
)
from keras_ddl.errors import DependencyError
from keras_ddl.strategy.keras_patches import callbacks, optimizer, reading, saving, trainer, variable

_lock = threading.Lock()
_installed: set[str] = set()


def install(*, shards: bool = False) -> None:
    """Installs the patches, once per process; `shards`: also those of optimizers whose slots are held in shards.

    Raises: DependencyError: this Keras lacks something that is to be replaced. Nothing is replaced then, and no later
        call does without it: some of the patches alone would silently train wrongly.
    """
    with _lock:
        if shards and "shards" not in _installed:
            _replace(_table_of_shards())
            _installed.add("shards")
        if "all" in _installed:
            return
        if not keras.__version__.startswith(TESTED):
            stack_position.warn(
                f"keras_ddl was tested with Keras {', '.join(TESTED)} and changes parts of Keras that are not public. "
                f"Received: Keras {keras.__version__}. Compare a short run with one on a single rank, or install a "
                "tested version."
            )
        _replace(_table())
        TFTrainer.stop_training = trainer.STOP_TRAINING
        _installed.add("all")


def _replace(table: list[tuple[Any, str, Any]]) -> None:
    for owner, name, _ in table:
        if not hasattr(owner, name):
            where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
            raise DependencyError(
                f"keras_ddl replaces {where}.{name}, which Keras {keras.__version__} does not have. Install Keras "
                f"{TESTED[-1]}."
            )
    for owner, name, make in table:
        original = getattr(owner, name)
        replacement = make(original)
        is_function = callable(original) and not isinstance(original, type)
        setattr(owner, name, functools.wraps(original)(replacement) if is_function else replacement)


def _table() -> list[tuple[Any, str, Any]]:
    """Returns (owner, attribute, function from the original to its replacement) for every patch."""
    return [
        (Trainer, "compile", trainer.compile_model),
        (TFTrainer, "fit", trainer.fit),
        (TFTrainer, "evaluate", trainer.evaluate_or_predict),
        (TFTrainer, "predict", trainer.evaluate_or_predict),
        (TFTrainer, "_make_function", trainer.make_function),
        (TFTrainer, "make_predict_function", trainer.make_predict_function),
        (TFTrainer, "_maybe_symbolic_build", reading.maybe_symbolic_build),
        (Trainer, "_get_metrics_result_or_logs", trainer.get_metrics_result_or_logs),
        (tf_trainer, "TFEpochIterator", lambda _: reading.EpochIterator),
        (tf_trainer.callbacks_module, "CallbackList", lambda _: callbacks.CallbackList),
        (TFVariable, "_initialize", variable.initialize),
        (saving_lib, "save_model", saving.once),
        (saving_lib, "save_weights_only", saving.once),
        (legacy_h5_format, "save_model_to_hdf5", saving.once),
        (keras.Model, "export", saving.once),
        (io_utils, "ask_to_proceed_with_overwrite", saving.ask_to_proceed_with_overwrite),
    ]


def _table_of_shards() -> list[tuple[Any, str, Any]]:
    """Returns the same for Strategy(shard_optimizer=True): how optimizers make and finish what they keep."""
    return [
        (BaseOptimizer, "build", optimizer.build),
        (TFOptimizer, "add_variable_from_reference", optimizer.add_variable_from_reference),
        (BaseOptimizer, "finalize_variable_values", optimizer.finalize_variable_values),
    ]
