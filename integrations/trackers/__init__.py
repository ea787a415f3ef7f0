"""Makes a script's MLflow and Weights & Biases log once, from rank 0.

Every rank runs the script, including `wandb.init()` and `mlflow.start_run()`. So on the other ranks wandb's runs are
"disabled", and MLflow logs to a folder that is removed with the process. All calls work there but leave no output. The
launcher's variables give the rank, because scripts start trackers before `Strategy()`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from keras_ddl import config
from keras_ddl.compat import replacing
from keras_ddl.errors import ConfigError
from keras_ddl.packages.after_import import AfterImport
from keras_ddl.topology.launcher import find_launcher
from keras_ddl.trackers import mlflow_scratch


def disable_runs(wandb: ModuleType, notify: Callable[[], None]) -> None:
    """Makes `wandb.init` start disabled runs, whatever its arguments and WANDB_MODE are (wandb 0.31).

    Args:
        notify: tells the user; called when a run is started.
    """

    def init(original: Any, *args: Any, **kwargs: Any) -> Any:
        notify()
        return original(*args, **{**kwargs, "mode": "disabled"})

    replacing.replace([(wandb, "init", init)])


_CHANGES: dict[str, Callable[..., None]] = {
    "mlflow": mlflow_scratch.log_to_scratch,
    "wandb": disable_runs,
}
_after_import = AfterImport({})
_LOGGED_BY_RANK_0 = (
    "keras_ddl: MLflow and Weights & Biases log on rank 0 only; runs of the other ranks are discarded. To give each "
    "rank its own run, set KERAS_DDL_TRACK_ALL_RANKS=1"
)


def leave_to_rank_0() -> None:
    """Makes the trackers of a rank other than 0 write nothing, now or when they are imported.

    It does nothing on rank 0, without a launcher, and with KERAS_DDL_TRACK_ALL_RANKS=1. When the first run starts,
    rank 1 prints on stderr what happens and how to change it, because ranks may be independent tasks (a sweep by srun).
    """
    with contextlib.suppress(ConfigError):  # an import must not raise it; init() will
        launcher = find_launcher()
        if launcher is None or launcher.rank == 0 or config.get("TRACK_ALL_RANKS"):
            return
        if _after_import in sys.meta_path:
            return
        notify = functools.cache(lambda: print(_LOGGED_BY_RANK_0, file=sys.stderr, flush=True))
        _after_import.calls = {
            name: functools.partial(change, notify=notify if launcher.rank == 1 else lambda: None)
            for name, change in _CHANGES.items()
        }
        sys.meta_path.insert(0, _after_import)
        for name in _CHANGES.keys() & sys.modules.keys():
            _after_import.calls[name](sys.modules[name])
