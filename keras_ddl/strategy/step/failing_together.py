"""Makes a call of a step that fails on one rank fail on all ranks, with that rank's error.

All ranks make the same calls of steps. A rank whose call raises cancels the collectives of the others (an alarm), so
that their calls also fail. Then all ranks exchange their errors, and raise the error of the lowest rank that had its
own. At that point no collective of the failed calls is pending, so the program may catch the error and continue.

A graph ends only when the collectives that it has started end. These may wait for ranks that wait for other
collectives, which this rank will never start. So a thread checks now and then whether TensorFlow has cancelled a graph
that still runs, and raises the alarm.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from keras_ddl import communicator, errors
from keras_ddl.communicator.native.started import Started
from keras_ddl.communicator.reporting import idleness
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.context import Setting
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import BatchRows
from keras_ddl.errors import (
    CollectiveError,
    DeadlineError,
    KerasDdlError,
    NotInitializedError,
    RankError,
    RankLostError,
    RankMismatchError,
    StepCancelledError,
    are_alike,
)
from keras_ddl.strategy.step.cut_step import ConcreteFunction, CutStep

_CHECK_SECONDS = 0.05
# Errors that every rank raises anyway, or that leave no rank to agree with.
_ERRORS_OF_ALL = (CollectiveError, DeadlineError, NotInitializedError, RankLostError, RankMismatchError)
# All ranks reach the end of the data together.
_ENDS = (StopIteration, tf.errors.OutOfRangeError)

_T = TypeVar("_T")
_calls: list[_Call] = []  # the running calls of all threads
_in_call = Setting("in_call", False)
_thread = threading.local()
_starting = threading.Lock()
_watching = False


_callers: weakref.WeakSet[Caller] = weakref.WeakSet()


class CommonTrace(NamedTuple):
    """A rank's trace, for comparison with other ranks' traces. `kind`: the kind of its batches."""

    concrete: ConcreteFunction
    kind: str


class Caller:
    """Base class of callers of one step on all ranks.

    Before a failed call raises, variables that it has written are restored, and traces that not all ranks have are
    forgotten.
    """

    def __init__(self, cut_step: CutStep) -> None:
        self.cut_step = cut_step
        self._traces_before = 0
        _callers.add(self)

    def may_have_traced(self, is_python: bool) -> bool:
        """Whether this call has traced, or was tracing when it failed. `is_python`: it failed with a Python error."""
        return self.cut_step.traces != self._traces_before

    def forget_traces(self) -> None:
        """Forgets the traces, because a rank has failed before its graph ran, and ranks must trace together."""
        self.cut_step.forget_traces()

    def trace_ahead(self, rows: BatchRows) -> None:
        """Traces the step for such batches before this rank joins the ranks that run it."""

    def common_trace(self) -> CommonTrace | None:
        """Returns this rank's trace of the step; None if it has none or several."""
        return None

    def together(self, call: Callable[[], _T]) -> _T:
        """Returns `call()`. COLLECTIVE: all ranks make the same calls, and one rank's exception is raised on all."""
        self._traces_before = self.cut_step.traces
        self.cut_step.begin()
        return call() if _in_call.get() or communicator.size() == 1 else _together(call, self)


def forget_all_traces(but: Caller | None = None) -> None:
    """Makes all steps of the process except one forget their traces. Call it on all ranks between calls."""
    for each in list(_callers):
        if each is not but:
            each.forget_traces()


def _together(call: Callable[[], _T], caller: Caller) -> _T:
    under_way = _Call(_manager())
    _watch()
    _calls.append(under_way)
    try:
        with _in_call(True), tf_compat.CancellationManagerContext(under_way.manager):
            return call()
    except Exception as error:
        if under_way.end() and isinstance(error, _ENDS):
            raise
        raised = _agree(under_way, error, caller)
        if raised is error:
            raise
        raise raised from (None if isinstance(error, StepCancelledError) else error)
    finally:
        under_way.end()
        _calls.remove(under_way)


def _manager() -> tf_compat.CancellationManager:
    """Returns this thread's CancellationManager, which TensorFlow cancels when a graph fails; reused until then."""
    manager = getattr(_thread, "manager", None)
    if manager is None or manager.is_cancelled:
        manager = _thread.manager = tf_compat.CancellationManager()
    return manager


class _Call:
    """A running call."""

    def __init__(self, manager: tf_compat.CancellationManager) -> None:
        self.manager = manager
        self._lock = threading.Lock()
        self._alarm: Started | None = None
        self._ended = self._was_cancelled = False

    def check(self) -> None:
        """Raises the alarm if a graph has failed and does not end. Called by the watching thread."""
        if not self.manager.is_cancelled:
            return
        if self._was_cancelled:  # cancelled since the last check, so it does not end by itself
            with self._lock:
                if not self._ended and self._alarm is None:
                    self._alarm = communicator.communicator_of(None).start_alarm()
        self._was_cancelled = True

    def end(self) -> bool:
        """Ends the checks. Returns whether no alarm was raised."""
        with self._lock:
            self._ended = True
            return self._alarm is None

    def alarm(self) -> Started:
        """Returns the alarm; raises it if it was not raised."""
        self._alarm = self._alarm or communicator.communicator_of(None).start_alarm()
        return self._alarm


def _watch() -> None:
    global _watching
    if _watching:
        return
    with _starting:
        if not _watching:
            _watching = True
            threading.Thread(target=_check_calls, name="keras_ddl-steps", daemon=True).start()


def _check_calls() -> None:
    idleness.this_thread_polls()
    while True:
        time.sleep(_CHECK_SECONDS)
        for call in tuple(_calls):
            try:
                call.check()
            except KerasDdlError:  # the communicator was closed
                pass


@dataclass
class _Report:
    """A rank's failure. `kind`: the pickled class of its own error; None if it failed only because another rank did."""

    kind: bytes | None
    text: str
    in_tracing: bool

    def is_like(self, other: _Report) -> bool:
        """Whether both ranks failed by themselves with equal errors, apart from numbers in the texts."""
        return self.kind == other.kind and self.kind is not None and are_alike(self.text, other.text)


def _agree(call: _Call, error: Exception, caller: Caller) -> Exception:
    """Returns the error that this rank raises."""
    caller.cut_step.restore()
    if isinstance(error, _ERRORS_OF_ALL) and not isinstance(error, StepCancelledError) and call.end():
        return error
    comm = communicator.communicator_of(None)
    try:
        alarm = call.alarm()
        alarm.wait()
        problem = alarm.error()
        if problem is not None:
            raise problem
        reports: list[_Report] = comm.come_together(_report(error, caller))
    except KerasDdlError as problem:  # no rank is left to agree with
        return problem if isinstance(error, StepCancelledError) else error
    if any(each.in_tracing for each in reports):
        caller.forget_traces()
    rank = next((r for r, each in enumerate(reports) if each.kind is not None), None)
    if rank is None or rank == comm.rank or reports[rank] == reports[comm.rank]:
        return error
    return _error_of_rank(rank, reports[rank], is_alike=reports[rank].is_like(reports[comm.rank]))


def _report(error: Exception, caller: Caller) -> _Report:
    if isinstance(error, (StepCancelledError, tf.errors.CancelledError)):  # for an operation not begun
        return _Report(None, "", caller.may_have_traced(is_python=False))
    try:
        kind = pickle.dumps(type(error))
    except Exception:  # e.g. a class defined in a function
        kind = b""
    if isinstance(error, tf.errors.OpError):  # raised by a running graph
        return _Report(kind, error.message or "", caller.may_have_traced(is_python=False))
    return _Report(kind, str(error), caller.may_have_traced(is_python=True))


def _error_of_rank(rank: int, report: _Report, *, is_alike: bool) -> Exception:
    """Returns another rank's error with its text, and with its class if that can be made here.

    `is_alike`: this rank had the same error, which its report for the launcher says.
    """
    words = f"{errors.name_of_rank(rank)}: {report.text}"
    try:
        kind = pickle.loads(report.kind or b"")
        made = kind(None, None, words) if issubclass(kind, tf.errors.OpError) else kind(words)
    except Exception:
        made = RankError(words)
    made.failed_rank, made.failed_alike = rank, is_alike
    return made
