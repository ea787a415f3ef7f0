"""Newcomers in a simulated job (simulated_job.py): their boards, a model, and the exchange with other ranks.

`Admission`, `Newcomer`, `Record` and `Replay` are real. The rest is simulated: one board that all ranks see, the
launcher's answers, and the model state that `joining` sends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import numpy as np
from simulated_engine import Killed, World
from simulated_job import Rank, broadcast, open_world, this_rank

from keras_ddl import communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.transports.membership import Membership
from keras_ddl.resilience import admission, joining, joining_state, replayed_calls, survival
from keras_ddl.strategy.calls import fits
from keras_ddl.strategy.step import failing_together
from keras_ddl.topology import make_topology


class Board:
    """Replaces `board.Board`. Ranks access it one after the other, and each access is a choice of the job."""

    name = ""

    def __init__(self) -> None:
        self._shown: dict[str, Any] = {"has_question": False, "admit_at": 0}
        self._questions: dict[tuple[str, str], str] = {}
        self._answers: dict[str, bytes] = {}
        self.asked_to_join: dict[int, int] = {}  # {newcomer: steps that the others had made in the fit}

    def key(self) -> tuple[Any, ...]:
        questions = tuple(sorted(self._questions.items()))
        return *self._shown.values(), questions, tuple(sorted(self._answers.items()))

    @property
    def has_question(self) -> bool:
        return this_rank().learn(self._shown["has_question"])

    @has_question.setter
    def has_question(self, value: bool) -> None:
        self._shown["has_question"] = value

    @property
    def admit_at(self) -> int:
        if communicator.rank() != 0:  # only rank 0 writes it
            this_rank().pause(("board",))
        return this_rank().learn(self._shown["admit_at"])

    @admit_at.setter
    def admit_at(self, calls: int) -> None:
        this_rank().pause(("board",))
        self._shown["admit_at"] = calls

    def ask(self, what: str, text: str = "") -> None:
        this_rank().pause(("board",))
        self._questions[what, self.name] = text
        self._shown["has_question"] = True
        if what == "join":
            rank = this_rank()
            made = max(each.iterations.value for each in rank.job.ranks)
            self.asked_to_join[rank.number] = made - rank.first_batch

    def questions(self, what: str) -> dict[str, str]:
        this_rank().pause(("board",))
        return this_rank().learn({name: text for (each, name), text in self._questions.items() if each == what})

    def answer(self, name: str, record: bytes) -> None:
        this_rank().pause(("board",))
        self._answers[name] = record

    def forget(self, what: str, name: str | None = None) -> None:
        this_rank().pause(("board",))
        self._questions.pop((what, name or self.name), None)

    def has_answer(self) -> bool:
        return self.name in self._answers

    def take_answer(self) -> bytes | None:
        if self.name not in self._answers:
            this_rank().pause(("look", self.has_answer))
        return this_rank().learn(self._answers.pop(self.name, None))

    def let_leave(self, rank: int) -> None:
        """Asks only this rank to leave, as the launcher would."""
        self._questions = {each: text for each, text in self._questions.items() if each[0] != "leave"}
        self._questions["leave", str(rank)] = ""
        self._shown["has_question"] = True

    def forget_leaving(self, rank: int) -> None:
        """Forgets the request, because the rank has left."""
        self._questions.pop(("leave", str(rank)), None)

    def of(self, newcomer: int) -> Board:
        """Returns the board as a newcomer sees it."""
        board = copy.copy(self)
        board.name = str(newcomer)
        return board


class Model:
    """Replaces a model; its variables are those of the rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.train_function = rank, None


class Callbacks:
    """Replaces the list of callbacks of a fit; its only callback records the results of steps."""

    def __init__(self, model: Model) -> None:
        self.model, self.position = model, (0, 0, None)
        self.seen = SimpleNamespace(returned=[])
        self.callbacks = [self.seen]

    def agreed_state(self) -> list[Any]:
        return []

    def checksums(self) -> dict[str, int]:
        return {"state": hash(self.model.rank.state.value)}

    def become_first(self, *, may_lack_last: bool) -> None:
        """Does nothing, because callbacks write nothing."""

    def flush(self) -> None:
        """Does nothing, because callbacks write nothing."""

    def compare(self) -> None:
        """Compares the weights of all ranks. COLLECTIVE."""
        state = self.model.rank.state.value
        values = communicator.communicator_of(None).native().all_gather_bytes(state, "compare")
        assert values == [state] * len(values), values


class _Restoration:
    """Replaces `progress.Restoration`."""

    def __init__(self, model: Model, record: dict[str, Any], arrays: dict[str, Any]) -> None:
        self._rank, self._record, self._arrays = model.rank, record, arrays

    def at_train_begin(self) -> None:
        self._rank.state.assign(self._arrays["state"])
        self._rank.iterations.assign(self._arrays["iterations"])

    def at_epoch_begin(self, _: Any) -> None:
        self._rank.first_batch = self._record["batches"]


def begin(rank: Rank) -> None:
    """Starts the program of a rank, or of a newcomer once the job needs it."""
    job, members = rank.job, tuple(range(rank.job.size))
    if rank.number < job.size:
        open_world(rank, make_topology(rank.number, ["host"] * job.size), job.world(0, members))
        rank.record = job.board and history.Record(job.board, [], 0)
        return
    rank.pause(("ask", {"start": True}))
    communicator.world._state.membership = membership = rank.pause(("answer",))
    place = make_topology(min(len(membership.members), job.size - 1), ["host"] * job.size)
    open_world(rank, place, World((rank.number,)))
    rank.record = history.Replay(job.board.of(rank.number))


def _join(is_over: Callable[[], bool]) -> Membership | None:
    """Replaces `membership.join`."""
    rank = this_rank()
    rank.pause(("ask", {"join": True}))
    members = rank.pause(("join", is_over))
    if members is None:
        rank.pause(("ask", {"join": False}))
    return members


def _give_up(error: Exception) -> NoReturn:
    """Replaces `joining.give_up`."""
    rank = this_rank()
    rank.job.errors[rank.number] = error
    rank.die()
    raise Killed


def _begin_history(record: history.Record | history.Replay | None) -> None:
    this_rank().record = record


def _share_variables(model: Model, giver: int) -> None:
    broadcast([model.rank.state, model.rank.iterations], giver)


def _capture(model: Model, _: Any, epochs: int, batches: int, logs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    rank = model.rank
    return {"batches": batches}, {"state": rank.state.value, "iterations": rank.iterations.value}


def _begin_at(model: Model, epoch: int) -> None:
    """Replaces `fits.begin_at`."""


@contextmanager
def simulated_newcomers() -> Iterator[None]:
    """Lets simulated ranks admit newcomers inside the context."""
    order = SimpleNamespace(
        digest=lambda batch: SimpleNamespace(numpy=lambda: np.asarray(batch)),
        forget_notes=lambda: None,
        passes=lambda: np.zeros(1),
        set_passes=lambda _: None,
        PASS_OF_NEWCOMERS=7,
    )
    agreement = SimpleNamespace(
        all_variables=lambda model: [model.rank.state, model.rank.iterations],
        broadcast_variables=broadcast,
        descriptions=lambda _: [],
        built_optimizers=lambda _: {},
        build_optimizers=lambda *_: None,
    )
    patches = [
        mock.patch.object(history, "begin", _begin_history),
        mock.patch.object(history, "current", lambda: this_rank().record),
        mock.patch.object(communicator.meeting, "joined_membership", lambda _, is_over: _join(is_over)),
        mock.patch.object(failing_together, "forget_all_traces", lambda but: this_rank().caller.forget_traces()),
        mock.patch.object(fits, "begin_at", _begin_at),
        mock.patch.object(replayed_calls, "_ended", lambda returned, *_: returned),
        mock.patch.object(replayed_calls, "_take", lambda result, *_: result),
        mock.patch.object(joining, "agreement", agreement),
        mock.patch.object(admission, "agreement", agreement),
        mock.patch.object(joining_state, "agreement", agreement),
        mock.patch.object(joining, "build_for_data", lambda _: None),
        mock.patch.object(joining, "_trace_ahead", lambda _: None),
        mock.patch.object(joining, "_values_of", lambda _: []),
        # Otherwise each step has another exchange, and there are too many schedules.
        mock.patch.object(admission, "TRIAL_STEPS", 1),
        mock.patch.object(joining, "number_slots", lambda *_: None),
        mock.patch.object(admission, "sharded_slots", SimpleNamespace(numbers_in=lambda _: ([], 0))),
        mock.patch.object(admission, "capture", _capture),
        mock.patch.object(admission, "share_variables", _share_variables),
        mock.patch.object(joining, "share_variables", _share_variables),
        mock.patch.object(joining_state, "epoch_iterators", SimpleNamespace(forget_validation=lambda _: None)),
        mock.patch.object(joining, "give_up", _give_up),
        mock.patch.object(admission, "give_up", _give_up),
        *(mock.patch.object(each, "order", order) for each in (joining, admission, joining_state)),
        mock.patch.object(joining, "Restoration", _Restoration),
        mock.patch.object(survival, "give_up", _give_up),
        mock.patch.object(replayed_calls, "give_up", _give_up),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
