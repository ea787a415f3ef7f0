"""Identifies callbacks of Keras and other packages that only write files, without importing those packages.

Such a callback can run on rank 0 alone, because it decides nothing for other ranks (BackupAndRestore's state on
rank 0 is sent to all). A program's subclass runs on all ranks, because its code may change logs or stop training;
only its inherited hooks run on rank 0 alone (keras_patches/standby.py).
"""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.keras import keras
from keras_ddl.compat.replacing import class_of

KERAS_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("BackupAndRestore", "CSVLogger", "OrbaxCheckpoint", "ProgbarLogger", "RemoteMonitor", "TensorBoard")
    if hasattr(keras.callbacks, name)
)
HOOKS = tuple(
    f"on_{kind}_{moment}"
    for kind in ("train", "test", "predict", "epoch", "batch", "train_batch", "test_batch", "predict_batch")
    for moment in ("begin", "end")
)
_OTHER_WRITERS = frozenset(
    {
        "mlflow.keras.callback.MlflowCallback",
        "tensorboard.plugins.hparams._keras.Callback",
        "wandb.integration.keras.callbacks.metrics_logger.WandbMetricsLogger",
        "wandb.integration.keras.callbacks.model_checkpoint.WandbModelCheckpoint",
    }
)


def writing_class(callback: Any) -> type | None:
    """Returns the writing class that a callback has or inherits from, or None."""
    for kind in class_of(callback).__mro__:
        if kind in KERAS_WRITERS or f"{kind.__module__}.{kind.__qualname__}" in _OTHER_WRITERS:
            return kind
    return None


def only_writes(callback: Any) -> bool:
    """Whether a callback is an object of a writing class itself, not of a program's subclass."""
    return writing_class(callback) is class_of(callback) and not any(hook in vars(callback) for hook in HOOKS)
