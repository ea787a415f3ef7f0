"""Weights & Biases on ranks other than 0: its own mode "disabled", in which every call works and nothing is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def disable_runs(wandb: ModuleType, notify: Callable[[], None]) -> None:
    """Has `wandb.init` start disabled runs, whatever its arguments and WANDB_MODE are (wandb 0.31).

    Args:
        notify: tells the user; called when a run is started.
    """
    init = wandb.init

    @functools.wraps(init)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        notify()
        return init(*args, **{**kwargs, "mode": "disabled"})

    wandb.init = disabled  # type: ignore[attr-defined]
