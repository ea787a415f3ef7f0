"""A job that continues when ranks are lost, and that ranks may join.

There is one such object per process, in a module variable: a process is one rank of one job, and all Strategies and
models of the process lose the same ranks. After `keras_ddl.shutdown` the process may join another job, which gets a new
object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.communicator.newcomers import history
from keras_ddl.resilience import replayed_calls
from keras_ddl.resilience.admission import Admission
from keras_ddl.resilience.joining import Newcomer
from keras_ddl.resilience.survival import Survival


class ContinuingJob(Survival):
    """Adds to Survival how ranks join the job."""

    def __init__(self) -> None:
        super().__init__()
        recorded = history.current()
        if isinstance(recorded, history.Replay):
            self.joining = Newcomer(recorded, self)
        elif recorded is not None:
            self.joining = Admission(recorded, self)

    def call_of_trainer(
        self, method: str, model: Any, call: Callable[[], Any], callbacks: Callable[[], list[Any]] = list
    ) -> Any:
        return replayed_calls.call_of_trainer(self, method, model, call, callbacks)


_current: list[ContinuingJob] = []


def current() -> ContinuingJob:
    """Returns the Resilience of this job."""
    if not _current or not history.recovers():  # `keras_ddl.shutdown` has ended an earlier job of this process
        _current[:] = [ContinuingJob()]
    return _current[0]
