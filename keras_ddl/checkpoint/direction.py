"""Decides whether lower or higher values of a metric are better: by the metric object, else by its exact name.

Parts of names would mislead: `val_accel_loss` contains "acc" and `val_dice_loss` contains "dice"; both are losses.
"""

from __future__ import annotations

import re
from typing import Any

from keras_ddl.errors import CheckpointError, ConfigError

# Keras's names of metrics and losses, and short forms. Ambiguous names ("dice", "cosine_similarity") are left out.
_NAMES = (
    (
        "max",
        "acc accuracy binary_accuracy categorical_accuracy sparse_categorical_accuracy top_k_categorical_accuracy "
        "sparse_top_k_categorical_accuracy auc precision recall precision_at_recall recall_at_precision "
        "sensitivity_at_specificity specificity_at_sensitivity f1_score fbeta_score io_u binary_io_u mean_io_u "
        "one_hot_io_u one_hot_mean_io_u iou mean_iou r2_score pearson_correlation concordance_correlation",
    ),
    (
        "min",
        "loss mse mae mape msle mean_squared_error mean_absolute_error mean_absolute_percentage_error "
        "mean_squared_logarithmic_error root_mean_squared_error rmse logcosh log_cosh huber poisson kl_divergence "
        "binary_crossentropy categorical_crossentropy sparse_categorical_crossentropy binary_focal_crossentropy "
        "categorical_focal_crossentropy hinge squared_hinge categorical_hinge perplexity",
    ),
)
_DIRECTIONS = {name: direction for direction, names in _NAMES for name in names.split()}


def direction_of_name(metric: str) -> str | None:
    """Returns 'min' or 'max' for a known name, else None.

    Case, the prefix `val_` and a number that Keras appended are ignored. `<any>_loss` is a loss.
    """
    name = re.sub(r"_\d+$", "", metric.lower().removeprefix("val_"))
    return _DIRECTIONS.get(name, "min" if name.endswith("_loss") else None)


def resolve_mode(metric: str, mode: str = "auto") -> str:
    """Returns 'min' or 'max'; 'auto' uses the exact name (`accuracy`, `auc`, `loss`, `<any>_loss`, ...).

    Raises: CheckpointError: 'auto' does not know the name.
    """
    known = direction_of_name(metric) if mode == "auto" else mode
    if known is None:
        raise CheckpointError(
            "To find the best checkpoint, keras_ddl must know whether lower or higher values of the metric are better. "
            f"Received: {metric!r}, which is not a metric of Keras. Give mode='min' or mode='max' (--mode)."
        )
    return known


def resolve_direction(model: Any, monitor: str, mode: str) -> str:
    """Returns 'min' or 'max'.

    'auto' takes the direction of the compiled metric of this name, else of the name itself. The name may have the
    output's name as a prefix, as in Keras's logs.
    Raises: ConfigError: both are unknown.
    """
    from keras_ddl.compat.models import metric_direction, metrics_in  # an export reads checkpoints without Keras

    if mode != "auto":
        return mode
    wanted = monitor.removeprefix("val_")
    outputs = [f"{name}_" for name in getattr(model, "output_names", None) or ()]
    names = [wanted, *(wanted.removeprefix(output) for output in outputs if wanted.startswith(output))]
    for metric in metrics_in(model):
        if getattr(metric, "name", None) in names and (direction := metric_direction(metric)) is not None:
            return direction
    known = next((direction for name in names if (direction := direction_of_name(name))), None)
    if known is None:
        raise ConfigError(
            "To keep the best checkpoint, Checkpoint must know whether lower or higher values of the metric are "
            f"better. Received: monitor={monitor!r}, mode='auto', but neither the compiled metrics nor the name decide "
            "it. Pass mode='min' or mode='max', or save_best=False."
        )
    return known
