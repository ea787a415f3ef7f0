"""Which calls the event loop answers itself."""

import numpy as np
import pytest

from keras_ddl.serving import call_times as call_times_module
from keras_ddl.serving.call_times import SHORT_SECONDS, CallTimes

QUICK, SLOW = SHORT_SECONDS / 2, SHORT_SECONDS * 2


def rows(number):
    return {"x": np.zeros((number, 4), np.float32)}


def test_a_call_is_short_up_to_the_size_that_was():
    call_times = CallTimes({"MatMul", "StatefulPartitionedCall", "ReadVariableOp"})
    assert not call_times.is_short("call", rows(1))  # nothing is known yet
    call_times.record("call", rows(8), QUICK)
    assert call_times.is_short("call", rows(8))
    assert not call_times.is_short("call", rows(9))
    assert not call_times.is_short("another call", rows(1))


def test_a_call_that_took_long_lowers_the_size():
    call_times = CallTimes({"MatMul"})
    call_times.record("call", rows(100), QUICK)
    call_times.record("call", rows(40), SLOW)
    assert call_times.is_short("call", rows(20))
    assert not call_times.is_short("call", rows(21))
    call_times.record("call", rows(30), QUICK)
    assert call_times.is_short("call", rows(30))


def test_after_a_wrong_guess_there_is_none_for_a_hundred_times_as_long(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(call_times_module.time, "monotonic", lambda: now[0])
    call_times = CallTimes({"Fill"})
    for call in ("call", "another call"):
        call_times.record(call, rows(8), QUICK)
    call_times.record("call", rows(2), 3.0)
    call_times.record("call", rows(8), QUICK)  # a client may send these in turn
    now[0] += 299
    assert not call_times.is_short("call", rows(1)) and not call_times.is_short("another call", rows(1))
    now[0] += 2
    assert call_times.is_short("call", rows(8)) and call_times.is_short("another call", rows(8))


def test_a_call_that_was_not_said_to_be_short_stops_no_others():
    call_times = CallTimes({"MatMul"})
    call_times.record("call", rows(8), QUICK)
    call_times.record("call", rows(100), 3.0)
    assert call_times.is_short("call", rows(8))


@pytest.mark.parametrize("operation", ["While", "StatelessWhile", "Enter", "QueueDequeueV2", "EagerPyFunc"])
def test_a_graph_of_unknown_length_is_never_short(operation):
    call_times = CallTimes({"MatMul", operation})
    call_times.record("call", rows(1), QUICK)
    assert not call_times.is_short("call", rows(1))


def test_strings_are_never_short():
    call_times = CallTimes({"MatMul"})
    strings = {"x": np.array([b"a"], object)}
    call_times.record("call", strings, QUICK)
    assert not call_times.is_short("call", strings)
