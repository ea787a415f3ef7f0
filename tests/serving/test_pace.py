"""Which calls the event loop answers itself."""

import numpy as np
import pytest

from keras_ddl.serving import pace as pace_module
from keras_ddl.serving.pace import SHORT_SECONDS, Pace

QUICK, SLOW = SHORT_SECONDS / 2, SHORT_SECONDS * 2


def rows(number):
    return {"x": np.zeros((number, 4), np.float32)}


def test_a_call_is_short_up_to_the_size_that_was():
    pace = Pace({"MatMul", "StatefulPartitionedCall", "ReadVariableOp"})
    assert not pace.is_short("call", rows(1))  # nothing is known yet
    pace.learn("call", rows(8), QUICK)
    assert pace.is_short("call", rows(8))
    assert not pace.is_short("call", rows(9))
    assert not pace.is_short("another call", rows(1))


def test_a_call_that_took_long_lowers_the_size():
    pace = Pace({"MatMul"})
    pace.learn("call", rows(100), QUICK)
    pace.learn("call", rows(40), SLOW)
    assert pace.is_short("call", rows(20))
    assert not pace.is_short("call", rows(21))
    pace.learn("call", rows(30), QUICK)
    assert pace.is_short("call", rows(30))


def test_after_a_wrong_guess_there_is_none_for_a_hundred_times_as_long(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(pace_module.time, "monotonic", lambda: now[0])
    pace = Pace({"Fill"})
    for call in ("call", "another call"):
        pace.learn(call, rows(8), QUICK)
    pace.learn("call", rows(2), 3.0)
    pace.learn("call", rows(8), QUICK)  # a client may send these in turn
    now[0] += 299
    assert not pace.is_short("call", rows(1)) and not pace.is_short("another call", rows(1))
    now[0] += 2
    assert pace.is_short("call", rows(8)) and pace.is_short("another call", rows(8))


def test_a_call_that_was_not_said_to_be_short_stops_no_others():
    pace = Pace({"MatMul"})
    pace.learn("call", rows(8), QUICK)
    pace.learn("call", rows(100), 3.0)
    assert pace.is_short("call", rows(8))


@pytest.mark.parametrize("operation", ["While", "StatelessWhile", "Enter", "QueueDequeueV2", "EagerPyFunc"])
def test_a_graph_of_unknown_length_is_never_short(operation):
    pace = Pace({"MatMul", operation})
    pace.learn("call", rows(1), QUICK)
    assert not pace.is_short("call", rows(1))


def test_strings_are_never_short():
    pace = Pace({"MatMul"})
    strings = {"x": np.array([b"a"], object)}
    pace.learn("call", strings, QUICK)
    assert not pace.is_short("call", strings)
