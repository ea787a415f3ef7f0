"""Which calls the event loop answers itself."""

import numpy as np
import pytest

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
