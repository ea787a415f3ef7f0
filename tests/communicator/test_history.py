"""What ranks have exchanged, and a newcomer's way through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from keras_ddl import config
from keras_ddl.communicator import history
from keras_ddl.communicator.history import Board, Record, Replay
from keras_ddl.errors import CollectiveError


@pytest.fixture
def board(tmp_path: Path) -> Board:
    (tmp_path / config.NEWCOMERS_FILE).write_bytes(bytes(config.NEWCOMERS_BYTES))
    made = history.board_in(str(tmp_path))
    assert made is not None
    return made


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


def test_a_job_without_spares_has_no_board(tmp_path: Path) -> None:
    assert history.board_in(str(tmp_path)) is None


def test_ranks_see_what_is_on_the_board(board: Board) -> None:
    other = Board(board.directory)
    assert not other.has_question and other.admit_at == 0
    board.has_question, board.admit_at = True, 2**40
    assert other.has_question and other.admit_at == 2**40
    other.has_question = False
    assert not board.has_question and board.admit_at == 2**40


def test_a_newcomer_gets_what_the_others_got(board: Board) -> None:
    record = Record(board, [], 0)
    array = np.arange(3.0)
    record.add("a", array)
    array += 1  # the program may go on with it
    record.add("b", {"c": [1, None]})
    replay = Replay(board, "3")
    with answering(record):
        np.testing.assert_array_equal(replay.result("a"), [0.0, 1.0, 2.0])
        assert replay.result("b") == {"c": [1, None]}


def test_a_newcomer_waits_for_the_others(board: Board) -> None:
    record, replay = Record(board, [], 0), Replay(board, "3")
    with answering(record):
        threading.Timer(0.1, record.add, ["a", 5]).start()
        begin = time.monotonic()
        assert replay.result("a") == 5 and time.monotonic() - begin > 0.05


def test_a_newcomer_that_makes_another_call_says_which(board: Board) -> None:
    record, replay = Record(board, [], 0), Replay(board, "3")
    record.add("barrier ", None)
    with answering(record), pytest.raises(CollectiveError, match="Received: all_gather_object a, where .* barrier"):
        replay.result("all_gather_object a")


def test_a_call_of_the_trainer_stands_for_all_that_was_exchanged_in_it(board: Board) -> None:
    record, replay = Record(board, [], 0), Replay(board, "3")
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


def test_a_newcomer_that_has_joined_goes_on_recording(board: Board) -> None:
    record, replay = Record(board, [], 0), Replay(board, "3")
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
def test_a_job_that_takes_no_newcomers_says_why(board: Board, spoil: Callable[[Record], object]) -> None:
    record, replay = Record(board, [], 0), Replay(board, "3")
    spoil(record)
    with answering(record), pytest.raises(CollectiveError, match="takes no newcomers"):
        replay.result("a")


def test_what_ranks_exchange_in_a_recorded_call_is_not_recorded_by_itself(board: Board) -> None:
    record, replay = Record(board, [], 0), Replay(board, "3")
    history.begin(record)
    try:
        assert history.recorded("outer", lambda: history.recorded("inner", lambda: 1) + 1) == 2
        with answering(record):
            history.begin(replay)
            assert history.recorded("outer", pytest.fail) == 2
    finally:
        history.begin(None)
