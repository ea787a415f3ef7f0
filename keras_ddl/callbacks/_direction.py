"""Whether a monitored metric is to be lower or higher: as its object says, else its exact name."""

from __future__ import annotations

from typing import Any

from keras_ddl.checkpoint.direction import direction_of_name
from keras_ddl.compat.models import metric_direction, metrics_in
from keras_ddl.errors import ConfigError


def resolve_direction(model: Any, monitor: str, mode: str) -> str:
    """Returns 'min' or 'max'.

    'auto' asks the compiled metric of that name which way it is better, then the name (`checkpoint.direction`); the
    output's name may stand before the metric's, as Keras writes it.
    Raises: ConfigError: neither says.
    """
    if mode != "auto":
        return mode
    wanted = monitor.removeprefix("val_")
    outputs = [f"{name}_" for name in getattr(model, "output_names", None) or ()]
    names = [wanted, *(wanted.removeprefix(output) for output in outputs if wanted.startswith(output))]
    for metric in metrics_in(model):
        if getattr(metric, "name", None) in names and (direction := metric_direction(metric)) is not None:
            return direction
    known = next((found for name in names if (found := direction_of_name(name))), None)
    if known is None:
        raise ConfigError(
            "Checkpoint keeps the best checkpoint by a metric of which it knows whether lower or higher is better. "
            f"Received: monitor={monitor!r}, mode='auto', and neither the compiled metrics nor the name say. Pass "
            "mode='min' or mode='max', or save_best=False."
        )
    return known
