"""The only package that imports Keras's private API, and the table of patches that make Keras exact under a Strategy.

The patches are installed when the first Strategy is made. Each asks whether the model, optimizer or context at hand
belongs to a keras_ddl.Strategy and otherwise does what Keras does. They were written for the Keras versions in
`TESTED`; another version is a warning, and a patch point it does not have is named in one.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
import weakref
from typing import Any

from keras_ddl import _tf_packages
from keras_ddl._tf_compat import tf

# ruff: noqa: E402  (before Keras is imported: with another backend that fails for a reason nobody would understand)
_tf_packages.check_keras_backend()

import keras
from keras.src import tree
from keras.src.backend.common import global_state
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.callbacks import CallbackList
from keras.src.layers import BatchNormalization
from keras.src.losses import loss as loss_module
from keras.src.optimizers import LossScaleOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.trainer import Trainer
from keras.src.utils.python_utils import pythonify_logs

_tf_packages.check_keras_backend()  # ~/.keras/keras.json may have named another one

__all__ = [
    "current_path",
    "install",
    "keras",
    "plain_name",
    "pythonify_logs",
    "replica_strategy",
    "strategy_of",
    "tree",
]

TESTED = ("3.15.",)

_lock = threading.Lock()
_installed = False
# Strategies of more than one rank, for the warning about models made outside of them.
strategies: weakref.WeakSet[Any] = weakref.WeakSet()


def is_ours(strategy: Any) -> bool:
    """Whether `strategy` is a keras_ddl.Strategy."""
    return getattr(strategy, "is_keras_ddl", False)


def strategy_of(owner: Any) -> Any:
    """Returns the keras_ddl.Strategy that a model (or optimizer) was made under, or None."""
    strategy = getattr(owner, "_distribute_strategy", None) or getattr(owner, "_distribution_strategy", None)
    return strategy if is_ours(strategy) else None


def scope_strategy() -> Any:
    """Returns the keras_ddl.Strategy whose scope is active, or None."""
    if not tf.distribute.has_strategy():
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if is_ours(strategy) else None


def replica_strategy() -> Any:
    """Returns the keras_ddl.Strategy of more than one rank inside whose `run` this is called, or None."""
    context = tf.distribute.get_replica_context()
    if context is None or not is_ours(context.strategy) or context.strategy.size == 1:
        return None
    return context.strategy


def plain_name(name: str) -> str:
    """Returns a name or path without the numbers that Keras appends: "dense_2/kernel" gives "dense/kernel".

    Keras counts objects by process, and a rank may have made another model before. What ranks match by must not
    depend on that.
    """
    return re.sub(r"_\d+(?=[/_]|$)", "", name)


def global_seed_generator() -> Any:
    """Returns the generator behind `seed=None` of keras.random, or None if nothing has used it yet."""
    return global_state.get_global_attribute("global_seed_generator")


def install() -> None:
    """Installs the patches, once per process."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    if not keras.__version__.startswith(TESTED):
        warnings.warn(
            f"keras_ddl was tested with Keras {', '.join(TESTED)}* and changes parts of Keras that are not public. "
            f"Received: Keras {keras.__version__}. Compare a short run with one on a single rank, or install a tested "
            "version.",
            stacklevel=3,
        )
    for owner, name, make in _table():
        original = getattr(owner, name, None)
        if original is None:
            where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
            warnings.warn(
                f"keras_ddl patches {where}.{name}, which Keras {keras.__version__} does not have: what "
                f"keras_ddl.{make.__module__.rpartition('.')[2]}.{make.__name__} promises will not hold. Install Keras "
                f"{TESTED[-1]}*.",
                stacklevel=3,
            )
            continue
        setattr(owner, name, functools.wraps(original)(make(original)))
    from keras_ddl._keras_compat import trainer

    tf_trainer.TensorFlowTrainer.stop_training = trainer.STOP_TRAINING


def _table() -> list[tuple[Any, str, Any]]:
    """Returns (owner, attribute, function from the original to its replacement) for every patch."""
    from keras_ddl._keras_compat import callbacks, loss, optimizer, reading, trainer

    tensorflow_trainer = tf_trainer.TensorFlowTrainer
    return [
        (Trainer, "compile", trainer.compile_model),
        (tensorflow_trainer, "fit", trainer.fit),
        (tensorflow_trainer, "evaluate", trainer.evaluate),
        (tensorflow_trainer, "predict", trainer.predict),
        (tensorflow_trainer, "train_on_batch", trainer.on_batch),
        (tensorflow_trainer, "test_on_batch", trainer.on_batch),
        (tensorflow_trainer, "predict_on_batch", trainer.predict_on_batch),
        (Trainer, "_get_metrics_result_or_logs", trainer.get_metrics_result_or_logs),
        (tf_trainer, "reduce_per_replica", trainer.reduce_per_replica),
        (tensorflow_trainer, "_maybe_symbolic_build", reading.maybe_symbolic_build),
        (tf_trainer.TFEpochIterator, "__init__", reading.epoch_iterator_init),
        (tf_trainer.TFEpochIterator, "_get_iterator", reading.get_iterator),
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
        (loss_module, "unscale_loss_for_distribution", loss.unscale_loss),
        (loss_module, "reduce_weighted_values", loss.reduce_weighted_values),
        (CompileLoss, "call", loss.compile_loss_call),
        (BatchNormalization, "_moments", loss.moments),
        (BaseOptimizer, "_backend_apply_gradients", optimizer.apply_gradients),
        (BaseOptimizer, "_clip_gradients", optimizer.clip_gradients),
        (BaseOptimizer, "_overwrite_variables_directly_with_gradients", optimizer.overwrite_variables),
        (TFOptimizer, "_all_reduce_sum_gradients", optimizer.all_reduce_sum_gradients),
        (LossScaleOptimizer, "_tf_apply", optimizer.loss_scale_apply),
    ]
