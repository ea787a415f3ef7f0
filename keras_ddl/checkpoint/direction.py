"""Decides by a metric's exact name whether lower or higher values are better.

Parts of names would mislead: `val_accel_loss` contains "acc" and `val_dice_loss` contains "dice"; both are losses.
"""

from __future__ import annotations

import re

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
