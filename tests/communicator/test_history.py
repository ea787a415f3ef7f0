"""What ranks have exchanged, and a newcomer's way through it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from link.wrappers import Wrapper

from keras_ddl.communicator.newcomers import board, history
from keras_ddl.communicator.newcomers.board import Board
from keras_ddl.communicator.newcomers.history import Record, Replay
from keras_ddl.errors import CollectiveError
from keras_ddl.launch.regroup.questions import Questions
from keras_ddl.link.kinds import Kind


class Job:
    """Rank 0 and a newcomer, each with its wrapper, and the launcher."""

    def __init__(self, folder: Path) -> None:
        self._questions = Questions(lambda rank, kind, message: self._wrappers[rank].send(kind, message))
        folders = [folder / "rank", folder / "newcomer"]
        self._wrappers = [Wrapper(each, partial(self._hear, rank)) for rank, each in enumerate(folders)]
        self.rank, self.newcomer = (Board(each.program()) for each in self._wrappers)

    def _hear(self, rank: int, kind: Kind, payload: bytes) -> None:
        if kind is Kind.RECORD:
            self._questions.pass_record(int.from_bytes(payload[:4]), payload[4:])
        elif kind is Kind.SHOWN:
            self._questions.has_shown(rank, json.loads(payload)["admit_at"])
        else:
            assert self._questions.take(rank, json.loads(payload), [0])

    def end(self) -> None:
        for each in self._wrappers:
            each.end()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.end()


@contextmanager
def answering(record: Record) -> Iterator[None]:
    """Rank 0, which looks now and then."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            if record.board.has_question:
                record.board.has_question = False
                record.answer_questions()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_job_that_takes_no_newcomers_has_no_board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERAS_DDL_RUN_DIR", str(tmp_path))
    assert board.current() is None


def test_a_rank_sees_what_is_on_its_board(job: Job) -> None:
    assert not job.rank.has_question and job.rank.admit_at == 0
    job.newcomer.ask("join", "2")
    assert job.rank.has_question and not job.newcomer.has_question
    job.rank.has_question = False
    assert job.rank.questions("join") == {"1": "2"} and job.rank.questions("record") == {}
    job.rank.forget("join", "1")
    assert job.rank.questions("join") == {}
    job.rank.admit_at = 2**40
    assert job.rank.admit_at == 2**40 and not job.rank.has_question


def test_a_newcomer_gets_what_the_others_got_or_will_get(job: Job) -> None:
    record = Record(job.rank, [], 0)
    array = np.arange(3.0)
    record.add("a", array)
    array += 1  # the program may go on with it
    record.add("b", {"c": [1, None]})
    replay = Replay(job.newcomer)
    with answering(record):
        np.testing.assert_array_equal(replay.result("a"), [0.0, 1.0, 2.0])
        assert replay.result("b") == {"c": [1, None]}
        threading.Timer(0.1, record.add, ["c", 5]).start()
        assert replay.result("c") == 5


def test_a_newcomer_that_makes_another_call_says_which(job: Job) -> None:
    record, replay = Record(job.rank, [], 0), Replay(job.newcomer)
    record.add("barrier ", None)
    with answering(record), pytest.raises(CollectiveError, match="Received: all_gather_object a, where .* barrier"):
        replay.result("all_gather_object a")


def test_a_call_of_the_trainer_stands_for_all_that_was_exchanged_in_it(job: Job) -> None:
    record, replay = Record(job.rank, [], 0), Replay(job.newcomer)
    record.add("before", 1)
    record.begin_call()
    record.add("in it", 2)
    record.pause()
    record.add("in a step", 3)
    with answering(record):
        assert replay.result("before") == 1
        replay.begin_call()
        assert not replay.has_ended("fit")
        assert replay.result("in it") == 2
        record.end_call("fit", "history")
        record.add("after", 4)
        assert replay.has_ended("fit")
        assert [replay.result("fit"), replay.result("after")] == ["history", 4]
    assert replay.calls == record.calls == 1


def test_a_newcomer_that_has_joined_goes_on_recording(job: Job) -> None:
    record, replay = Record(job.rank, [], 0), Replay(job.newcomer)
    record.add("before", 1)
    record.begin_call()
    record.add("in it", 2)
    record.pause()
    with answering(record):
        replay.result("before")
        replay.begin_call()
        replay.result("in it")
    own = replay.record()
    assert own.pickled() == record.pickled(), "another newcomer may come"
    for each in (record, own):
        each.add("in a step", 3)
        each.end_call("fit", "history")
        each.add("after", 4)
    assert own.pickled() == record.pickled() and own.calls == record.calls


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record.add("a", threading.Lock()),
        lambda record: record.close("a fit that has failed"),
        lambda record: [record.add("a", np.zeros(16 << 20)) for _ in range(3)],
    ],
    ids=["not picklable", "a fit that has failed", "too much"],
)
def test_a_job_that_takes_no_newcomers_says_why(job: Job, spoil: Callable[[Record], object]) -> None:
    record, replay = Record(job.rank, [], 0), Replay(job.newcomer)
    spoil(record)
    with answering(record), pytest.raises(CollectiveError, match="can take no new ranks"):
        replay.result("a")


def test_what_ranks_exchange_in_a_recorded_call_is_not_recorded_by_itself(job: Job) -> None:
    record, replay = Record(job.rank, [], 0), Replay(job.newcomer)
    history.begin(record)
    try:
        assert history.recorded("outer", lambda: history.recorded("inner", lambda: 1) + 1) == 2
        with answering(record):
            history.begin(replay)
            assert history.recorded("outer", pytest.fail) == 2
    finally:
        history.begin(None)
