"""Records the results that ranks have exchanged, so that a newcomer can run the same program up to their position.

A newcomer begins at the first line of the script. Its collectives, and its calls of `fit` that the other ranks have
already finished, return the results of the other ranks (`Replay`). So if a job may have newcomers, its members
record the results (`Record`) of the main thread's collectives that are equal on all ranks, and of calls of the trainer,
which replace the results of the collectives inside the call. Newcomers ask rank 0 for the record through their boards
(board.py).

The same collectives of all ranks are repeated when a job continues after ranks were lost (`repeated`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from keras_ddl.communicator.newcomers.board import Board
from keras_ddl.errors import CollectiveError

T = TypeVar("T")
_Function = TypeVar("_Function", bound="Callable[..., Any]")

_MAX_BYTES = 256 << 20  # limit of a record; a job that has exchanged more takes no newcomers


@dataclass(frozen=True)
class Entry:
    """A collective or a call of the trainer that has ended, and its pickled result."""

    what: str
    result: bytes


class Record:
    """The results that the ranks of this job have exchanged so far. Kept in memory, and equal on all ranks.

    Attributes:
        calls: number of calls of the trainer that have begun.
    """

    def __init__(self, board: Board, entries: list[Entry], calls: int) -> None:
        self.board, self.calls = board, calls
        self._entries = entries
        self._bytes = sum(len(each.result) for each in entries)
        self._call_began: int | None = None  # number of entries when the call began; None: no call is running
        self._is_paused = False
        self._why_closed = ""

    def add(self, what: str, result: Any) -> None:
        """Adds a result that is equal on all ranks."""
        if self._is_paused or self._why_closed:
            return
        try:
            entry = Entry(what, pickle.dumps(result, protocol=5))
        except Exception:  # for example, a class of the script
            self.close(f"a result of {what} that cannot be pickled")
            return
        self._entries.append(entry)
        self._bytes += len(entry.result)
        if self._bytes > _MAX_BYTES:
            self.close(f"more than {_MAX_BYTES >> 20} MB that the ranks have exchanged outside of fit")

    def extend(self, entry: Entry) -> None:
        """Adds an entry that another rank has recorded."""
        self._entries.append(entry)
        self._bytes += len(entry.result)

    @property
    def in_call(self) -> bool:
        """Returns whether a call of the trainer is running."""
        return self._call_began is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing inside the block."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def begin_call(self) -> None:
        """Called when a call of the trainer begins."""
        self.calls += 1
        self._call_began = len(self._entries)

    def pause(self) -> None:
        """Called when the first step of a call begins, because a newcomer cannot continue alone."""
        self._is_paused = True

    def end_call(self, what: str, result: Any) -> None:
        """Called when a call has ended. Its result replaces everything that was exchanged during the call."""
        del self._entries[self._call_began :]
        self._bytes = sum(len(each.result) for each in self._entries)
        self._call_began, self._is_paused = None, False
        self.add(what, result)

    def close(self, reason: str) -> None:
        """Makes the job take no more newcomers. `reason`: follows "Received: " in messages."""
        self._why_closed = self._why_closed or reason

    def answer_questions(self) -> None:
        """On rank 0: answers newcomers that ask for the record."""
        for name in self.board.questions("record"):
            self.board.answer(name, self.pickled())

    def pickled(self) -> bytes:
        """Returns the pickled record for a newcomer."""
        entries = [] if self._why_closed else [(each.what, each.result) for each in self._entries]
        return pickle.dumps((entries, self._why_closed), protocol=5)


class Replay:
    """A newcomer's position in the other ranks' record.

    Attributes:
        calls: number of calls of the trainer that this newcomer has begun.
    """

    def __init__(self, board: Board) -> None:
        self.board, self.calls = board, 0
        self._entries: list[Entry] = []
        self._next = self._call_began = 0

    def result(self, what: str) -> Any:
        """Returns the result of a collective on the other ranks. Waits for them if they have not run it yet."""
        while self._next == len(self._entries):
            self._read()
        entry = self._entries[self._next]
        if entry.what != what:
            raise CollectiveError(
                f"A rank that joins a running job must make the same calls as the other ranks. Received: {what}, where "
                f"the other ranks called {entry.what}. Calls of collectives and of fit must not depend on the rank, "
                "the time, or values that differ between runs."
            )
        self._next += 1
        return pickle.loads(entry.result)

    def begin_call(self) -> None:
        """Called when a call of the trainer begins."""
        self.calls += 1
        self._call_began = self._next

    def has_ended(self, what: str) -> bool:
        """Returns whether the other ranks have ended the running call. If so, `result(what)` returns its result."""
        self._read()
        return self._knows_end_of_call(what)

    def _knows_end_of_call(self, what: str) -> bool:
        at = self._call_began
        if at == len(self._entries) or self._entries[at].what != what:
            return False
        self._next = at
        return True

    def ask_to_join(self, what: str) -> bool:
        """Waits until the other ranks are about to admit this newcomer. Returns whether the call ended first."""
        self.board.ask("join", str(self.calls))
        self._take_answer()  # rank 0 may not look at the board again before it admits this newcomer
        has_ended = self._knows_end_of_call(what)
        if has_ended:
            self.board.forget("join")
        return has_ended

    def record(self) -> Record:
        """Returns the record that this newcomer will continue as a member."""
        record = Record(self.board, self._entries[: self._call_began], self.calls - 1)
        record.begin_call()
        for each in self._entries[self._call_began :]:  # entries before the first step, for the next newcomer
            record.extend(each)
        record.pause()
        return record

    def _read(self) -> None:
        self.board.ask("record")
        self._take_answer()
        self.board.forget("record")

    def _take_answer(self) -> None:
        entries, why_closed = pickle.loads(self.board.take_answer())
        if why_closed:
            raise CollectiveError(
                "A rank that joins a running job repeats the program with the recorded results of the other ranks. "
                f"Received: {why_closed}. The job can take no new ranks."
            )
        self._entries = [Entry(*each) for each in entries]


_of_job: Record | Replay | None = None


def current() -> Record | Replay | None:
    """Returns the record of this rank's job, or this newcomer's position in it; None: the job takes no newcomers."""
    return _of_job if threading.current_thread() is threading.main_thread() else None


def takes_newcomers() -> bool:
    """Returns whether the job was started with spares.

    If so, even a single remaining rank runs the collectives that a newcomer will need.
    """
    return _of_job is not None


def including_own(gathered: list[T], own: T) -> list[T]:
    """Returns the values of all ranks for a comparison. A newcomer is not among them, so its value is added."""
    return [*gathered, own] if isinstance(current(), Replay) else gathered


def begin(history: Record | Replay | None) -> None:
    """Sets the result of `current`."""
    global _of_job
    _of_job = history


def end() -> None:
    """Forgets the job, which has ended."""
    begin(None)
    recover_by(None)


_recover: Callable[..., Any] | None = None


def recover_by(recover: Callable[..., Any] | None) -> None:
    """Makes `recover(call, variables)` run all collectives of all ranks from now on, and repeat them if ranks are lost.

    It passes the communicator of the remaining ranks to `call`. A collective inside another one is only repeated with
    the outer one. None: collectives are not repeated.
    """
    global _recover
    _recover = recover


def recovers() -> bool:
    """Whether collectives over all ranks are repeated when ranks are lost."""
    return _recover is not None


def repeated(call: Callable[[Any], T], comm: Any, *variables: Callable[[], list[Any]]) -> T:
    """Returns `call(comm)`, a collective over all ranks; if ranks are lost, a continuing job repeats it without them.

    variables: returns the variables that `call` writes.
    """
    if _recover is None:
        return call(comm)
    result: T = _recover(call, *variables)
    return result


def recorded(what: str, make: Callable[[], T]) -> T:
    """Returns `make()`, which is equal on all ranks. A newcomer gets the other ranks' recorded result."""
    history = current()
    if history is None:
        return make()
    if isinstance(history, Replay):
        result: T = history.result(what)
        return result
    with history.paused():
        result = make()
    history.add(what, result)
    return result


def left_to_join(own: Callable[[], T], make: Callable[[], T]) -> T:
    """Returns `make()`, which gives all ranks one rank's values of variables.

    A newcomer returns `own()`, because it gets the values of all variables when it joins.
    """
    history = current()
    if history is None:
        return make()
    if isinstance(history, Replay):
        return own()
    with history.paused():
        return make()


def not_recorded(what: str, make: Callable[[], T]) -> T:
    """Returns `make()`, which differs between ranks. A newcomer cannot call it."""
    if isinstance(current(), Replay):
        raise CollectiveError(
            "A rank that joins a running job repeats the calls before fit with the recorded results of the other "
            f"ranks. Received: {what}, whose results differ between ranks. Leave out this call, or start the job "
            "without --spares."
        )
    return make()


def collective(
    is_of_all_ranks: Callable[[Any], bool], for_newcomers: Callable[..., Any] = recorded
) -> Callable[[_Function], _Function]:
    """Decorates a collective, so that newcomers get its result, and that it is repeated when ranks are lost.

    Args:
        is_of_all_ranks: whether a call on this communicator needs that: the method's `self`, or the argument `comm`.
        for_newcomers: `recorded`, `not_recorded`, or `left_to_join`, which returns the first argument in a newcomer.
    """

    def decorate(function: _Function) -> _Function:
        parameters = list(inspect.signature(function).parameters)
        is_method, place = parameters[0] == "self", parameters.index("name")

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            own = args[0] if is_method else kwargs.pop("comm", None)

            def call(comm: Any) -> Any:
                return function(comm, *args[1:], **kwargs) if is_method else function(*args, comm=comm, **kwargs)

            if not is_of_all_ranks(own):
                return call(own)
            name = kwargs.get("name", args[place] if len(args) > place else None)
            label = (lambda: args[0]) if for_newcomers is left_to_join else f"{function.__name__} {name or ''}".rstrip()
            result = for_newcomers(label, lambda: repeated(call, own))
            out = kwargs.get("out")
            if out is not None and out is not result:
                out[...] = result
                return out
            return result

        return cast("_Function", wrapper)

    return decorate
