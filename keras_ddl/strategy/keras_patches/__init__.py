"""Lists what a Strategy replaces in Keras: how fit reads data, calls callbacks and saves, but no mathematics.

A patch is a function of Keras's original and of the arguments of a call, or a class that replaces Keras's. Patches are
installed when the first Strategy is made. For a model without a keras_ddl.Strategy, each patch calls Keras's original.
A version of Keras that the patches were not written for gives a warning; a version that lacks something that they
replace is refused. No patch changes a computed value: losses, metrics, optimizers and layers stay as Keras made them.
"""

from __future__ import annotations

import functools
import threading

from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import replacing
from keras_ddl.compat.keras import (
    TESTED,
    BaseOptimizer,
    TFLayer,
    TFOptimizer,
    TFTrainer,
    TFVariable,
    Trainer,
    cloning,
    io_utils,
    keras,
    legacy_h5_format,
    saving_lib,
    tf_trainer,
)
from keras_ddl.strategy.keras_patches import (
    adopting,
    callbacks,
    compiling,
    other_files,
    reading,
    saving,
    trainer,
    variables,
)
from keras_ddl.strategy.shards import kept_weights

_lock = threading.Lock()


def install(*, shards: bool = False) -> None:
    """Installs the patches, once per process; `shards`: also those of optimizers whose slots are in shards.

    Raises: DependencyError: this Keras lacks something that is to be replaced. Nothing is replaced then, and every
        later call fails in the same way, because training with only some of the patches would silently be wrong.
    """
    with _lock:
        _install()
        if shards:
            _install_shards()


@functools.cache
def _install() -> None:
    if not keras.__version__.startswith(TESTED):
        stack_position.warn(
            f"keras_ddl was tested with Keras {', '.join(TESTED)} and changes private parts of Keras. Received: "
            f"Keras {keras.__version__}. Compare a short run with a run on one rank, or install a tested version."
        )
    replacing.replace([*_table(), *other_files.table()])
    replacing.set_values([(TFTrainer, "stop_training", trainer.STOP_TRAINING)])  # Keras has no such property


@functools.cache
def _install_shards() -> None:
    replacing.replace(_table_of_shards())


def _table() -> replacing.Table:
    return [
        (TFLayer, "__init__", adopting.init_layer),
        (cloning, "_clone_functional_model", adopting.clone),
        (cloning, "_clone_sequential_model", adopting.clone),
        (Trainer, "compile", compiling.compile_model),
        (TFTrainer, "fit", trainer.fit),
        (TFTrainer, "evaluate", functools.partial(trainer.evaluate_or_predict, "evaluate")),
        (TFTrainer, "predict", functools.partial(trainer.evaluate_or_predict, "predict")),
        (TFTrainer, "_make_function", trainer.make_function),
        (TFTrainer, "make_predict_function", trainer.make_predict_function),
        (TFTrainer, "_maybe_symbolic_build", reading.maybe_symbolic_build),
        (Trainer, "_get_metrics_result_or_logs", trainer.get_metrics_result_or_logs),
        (tf_trainer, "TFEpochIterator", reading.EpochIterator),
        (tf_trainer.callbacks_module, "CallbackList", callbacks.CallbackList),
        (TFVariable, "_initialize", variables.initialize),
        (saving_lib, "save_model", saving.once),
        (saving_lib, "save_weights_only", saving.once),
        (legacy_h5_format, "save_model_to_hdf5", saving.once),
        (keras.Model, "export", saving.once),
        (io_utils, "ask_to_proceed_with_overwrite", saving.ask_to_proceed_with_overwrite),
    ]


def _table_of_shards() -> replacing.Table:
    """Returns the patches for a Strategy with shards or a layout, for variables that are spread over ranks."""
    return [
        (BaseOptimizer, "build", variables.build),
        (TFVariable, "_initialize_with_initializer", variables.initialize_with_initializer),
        (TFOptimizer, "add_variable_from_reference", variables.add_variable_from_reference),
        (BaseOptimizer, "finalize_variable_values", variables.finalize_variable_values),
        (keras.Layer, "get_weights", kept_weights.get_weights),
        (keras.Layer, "set_weights", kept_weights.set_weights),
    ]
