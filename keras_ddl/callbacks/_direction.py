"""Decides whether a monitored metric is better when lower or higher: by the metric object, else by its name."""

from __future__ import annotations

from typing import Any

from keras_ddl.checkpoint.direction import direction_of_name
from keras_ddl.compat.models import metric_direction, metrics_in
from keras_ddl.errors import ConfigError


def resolve_direction(model: Any, monitor: str, mode: str) -> str:
    """Returns 'min' or 'max'.

    'auto' takes the direction of the compiled metric of that name, else that of the name (`checkpoint.direction`). The
    name may have the output's name as a prefix, as in Keras's logs.
    Raises: ConfigError: both are unknown.
    """
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
