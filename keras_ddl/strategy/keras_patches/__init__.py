"""The table of patches that make Keras exact under a Strategy.

They are installed when the first Strategy is made. Each asks whether the model, optimizer or context at hand belongs to
a keras_ddl.Strategy and otherwise does what Keras does. A version of Keras they were not written for is a warning, and
a patch point it does not have is named in one.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from keras_ddl.communicator import stack_position
from keras_ddl.compat.keras import (
    TESTED,
    ArrayDataAdapter,
    BaseOptimizer,
    BatchNormalization,
    CallbackList,
    LossScaleOptimizer,
    TFOptimizer,
    TFVariable,
    Trainer,
    io_utils,
    keras,
    legacy_h5_format,
    loss_module,
    saving_lib,
    tf_image,
    tf_random,
    tf_trainer,
)
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.keras_patches import (
    callbacks,
    layer_updates,
    loss,
    metric_results,
    metric_updates,
    metrics,
    optimizer,
    position,
    random,
    reading,
    saving,
    tape,
    trainer,
)

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Installs the patches, once per process."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    if not keras.__version__.startswith(TESTED):
        stack_position.warn(
            f"keras_ddl was tested with Keras {', '.join(TESTED)}* and changes parts of Keras that are not public. "
            f"Received: Keras {keras.__version__}. Compare a short run with one on a single rank, or install a tested "
            "version."
        )
    for owner, name, make in _table():
        original = getattr(owner, name, None)
        if original is None:
            where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
            stack_position.warn(
                f"keras_ddl patches {where}.{name}, which Keras {keras.__version__} does not have: what "
                f"keras_ddl.{make.__module__.rpartition('.')[2]}.{make.__name__} promises will not hold. Install Keras "
                f"{TESTED[-1]}*."
            )
            continue
        replacement = make(original)
        setattr(owner, name, functools.wraps(original)(replacement) if callable(original) else replacement)
    tf_trainer.TensorFlowTrainer.stop_training = trainer.STOP_TRAINING


def _table() -> list[tuple[Any, str, Any]]:
    """Returns (owner, attribute, function from the original to its replacement) for every patch."""
    tensorflow_trainer = tf_trainer.TensorFlowTrainer
    return [
        (Trainer, "compile", trainer.compile_model),
        (tensorflow_trainer, "fit", trainer.fit),
        (tensorflow_trainer, "evaluate", trainer.evaluate),
        (tensorflow_trainer, "predict", trainer.predict),
        (tensorflow_trainer, "train_on_batch", trainer.on_batch),
        (tensorflow_trainer, "test_on_batch", trainer.on_batch),
        (tensorflow_trainer, "predict_on_batch", trainer.predict_on_batch),
        (tensorflow_trainer, "_make_function", trainer.make_function),
        (Trainer, "_get_metrics_result_or_logs", trainer.get_metrics_result_or_logs),
        (tf_trainer, "reduce_per_replica", trainer.reduce_per_replica),
        (tensorflow_trainer, "_maybe_symbolic_build", reading.maybe_symbolic_build),
        (tf_trainer.TFEpochIterator, "__init__", reading.epoch_iterator_init),
        (tf_trainer.TFEpochIterator, "_get_iterator", reading.get_iterator),
        (tensorflow_trainer, "fit", position.fit),
        (tf_trainer.TFEpochIterator, "__init__", position.epoch_iterator_init),
        (tf_trainer.TFEpochIterator, "_enumerate_iterator", position.enumerate_iterator),
        (ArrayDataAdapter, "get_tf_dataset", reading.array_dataset),
        *((CallbackList, name, callbacks.hook) for name in callbacks.HOOKS),
        (CallbackList, "set_model", callbacks.set_model),
        (CallbackList, "on_train_begin", callbacks.on_train_begin),
        (CallbackList, "on_epoch_begin", callbacks.on_epoch_begin),
        (CallbackList, "on_epoch_end", callbacks.on_epoch_end),
        (CallbackList, "on_train_batch_begin", callbacks.on_train_batch_begin),
        (CallbackList, "on_train_batch_end", callbacks.on_train_batch_end),
        (CallbackList, "on_test_begin", callbacks.on_test_begin),
        (CallbackList, "on_test_batch_end", callbacks.on_test_batch_end),
        (CallbackList, "on_predict_begin", callbacks.on_predict_begin),
        (CallbackList, "on_predict_batch_end", callbacks.on_predict_batch_end),
        (loss_module, "scale_loss_for_distribution", loss.scale_loss),
        (loss_module, "reduce_weighted_values", loss.reduce_weighted_values),
        (BatchNormalization, "_moments", loss.moments),
        (BaseOptimizer, "_backend_apply_gradients", optimizer.apply_gradients),
        (BaseOptimizer, "iterations", optimizer.iterations),
        (BaseOptimizer, "_clip_gradients", optimizer.clip_gradients),
        (BaseOptimizer, "_overwrite_variables_directly_with_gradients", optimizer.overwrite_variables),
        (TFOptimizer, "_all_reduce_sum_gradients", optimizer.all_reduce_sum_gradients),
        (LossScaleOptimizer, "_tf_apply", optimizer.loss_scale_apply),
        (LossScaleOptimizer, "check_finite", optimizer.check_finite),
        (tf.GradientTape, "gradient", tape.gradient),
        (tf, "gradients", tape.gradients),
        (tf.GradientTape, "jacobian", tape.jacobian),
        (tf.GradientTape, "batch_jacobian", tape.jacobian),
        (keras.metrics.Mean, "update_state", metrics.mean_update_state),
        (keras.metrics.Sum, "update_state", metrics.sum_update_state),
        (keras.metrics.Metric, "__init__", metric_results.init),
        (TFVariable, "_direct_assign", metric_updates.direct_assign),
        (TFVariable, "_direct_assign", layer_updates.direct_assign),
        (TFVariable, "_initialize", layer_updates.initialize),
        (tf_random, "tf", random.tensorflow),
        (tf_image, "tf", random.tensorflow),
        (tf_random, "shuffle", random.shuffle),
        (saving_lib, "save_model", saving.once),
        (saving_lib, "save_weights_only", saving.once),
        (legacy_h5_format, "save_model_to_hdf5", saving.once),
        (keras.Model, "export", saving.once),
        (io_utils, "ask_to_proceed_with_overwrite", saving.ask_to_proceed_with_overwrite),
    ]
