"""Gives MLflow on ranks other than 0 its own store in a temporary folder.

MLflow has no mode that writes nothing. Its calls return values that later calls need, autologging predicts with the
model, which all ranks must do together, and the program may read its logs back. So all calls work as on rank 0.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from keras_ddl import config
from keras_ddl.compat import replacing
from keras_ddl.files.scratch import scratch_folder

# Arguments of start_run that name entries of rank 0's store.
_NAMES_IN_THE_STORE = ("run_id", "experiment_id", "parent_run_id")
_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends


def log_to_scratch(mlflow: ModuleType, notify: Callable[[], None]) -> None:
    """Makes MLflow (3.17) log to a folder that is removed with this process, whatever tracking URI the program sets.

    Args:
        notify: tells the user; called when a run is started.
    """
    # They name entries of rank 0's store.
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_REGISTRY_URI"):
        os.environ.pop(name, None)
    folder = scratch_folder("mlflow", config.get("RUN_DIR"))
    _folders.append(folder)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # else MLflow refuses file stores
    mlflow.set_tracking_uri(Path(folder.name, "runs").as_uri())  # MLflow creates it, with the experiment "Default"

    def stay(*_: Any) -> None:
        """Replaces set_tracking_uri and set_registry_uri."""

    def start_run(original: Any, *args: Any, **kwargs: Any) -> Any:
        notify()
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        return original(**{name: value for name, value in arguments.items() if name not in _NAMES_IN_THE_STORE})

    def set_experiment(original: Any, experiment_name: Any = None, experiment_id: Any = None, *args: Any) -> Any:
        return original(experiment_name or f"experiment {experiment_id}", *args)

    table = [(mlflow, "set_tracking_uri", stay), (mlflow, "set_registry_uri", stay)]
    replacing.replace([*table, (mlflow, "start_run", start_run), (mlflow, "set_experiment", set_experiment)])
