"""Which callbacks do nothing but write: those of Keras, and of packages that are not imported for it.

They decide nothing that other ranks need: what BackupAndRestore restores on rank 0 is sent to all.
"""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.keras import keras

OF_KERAS = tuple(
    getattr(keras.callbacks, name)
    for name in ("BackupAndRestore", "CSVLogger", "OrbaxCheckpoint", "ProgbarLogger", "RemoteMonitor", "TensorBoard")
    if hasattr(keras.callbacks, name)
)
_OF_OTHERS = frozenset(
    {
        "mlflow.keras.callback.MlflowCallback",
        "tensorboard.plugins.hparams._keras.Callback",
        "wandb.integration.keras.callbacks.metrics_logger.WandbMetricsLogger",
        "wandb.integration.keras.callbacks.model_checkpoint.WandbModelCheckpoint",
    }
)


def is_of_others(kind: type) -> bool:
    """Whether a class, not one derived from it, is a writer of another package."""
    return f"{kind.__module__}.{kind.__qualname__}" in _OF_OTHERS


def is_writer(callback: Any) -> bool:
    """Whether a callback is of one of these classes, or of one derived from them."""
    return isinstance(callback, OF_KERAS) or any(map(is_of_others, type(callback).__mro__))
