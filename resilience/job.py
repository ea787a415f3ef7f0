"""A job that continues when ranks are lost, and that ranks may join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.communicator.newcomers import history
from keras_ddl.resilience import replayed_calls
from keras_ddl.resilience.admission import Admission
from keras_ddl.resilience.joining import Newcomer
from keras_ddl.resilience.survival import Survival


class ContinuingJob(Survival):
    """A Survival with the way in which ranks join the job."""

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


_of_job: list[ContinuingJob] = []


def of_job() -> ContinuingJob:
    """Returns the Resilience of this job."""
    if not _of_job or not history.recovers():  # `keras_ddl.shutdown` has ended an earlier job of this process
        _of_job[:] = [ContinuingJob()]
    return _of_job[0]
