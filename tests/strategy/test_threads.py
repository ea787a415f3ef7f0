"""How many TensorFlow threads a rank gets."""

import os

import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import threads
from keras_ddl.strategy.threads import threads_of


def test_threads_are_the_share_of_cores_that_ranks_of_the_host_may_use():
    everything = range(8)
    assert [threads_of(r, (0, 0, 0, 1), [everything] * 4) for r in range(4)] == [2, 2, 2, None]
    assert threads_of(0, (0,) * 16, [everything] * 16) == 1


def test_threads_of_bound_ranks_are_those_of_their_cores():
    sockets = [range(4), range(4), range(4, 8), range(4, 8)]
    assert [threads_of(r, (0,) * 4, sockets) for r in range(4)] == [2] * 4
    assert [threads_of(r, (0,) * 4, [[r] for r in range(4)]) for r in range(4)] == [None] * 4


@pytest.mark.parametrize("variable", [None, "4"])
@pytest.mark.parametrize("chosen", [0, 3])
def test_threads_that_somebody_chose_stay(monkeypatch, variable, chosen):
    set_to = []
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: chosen)
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", set_to.append)
    if variable:
        monkeypatch.setitem(os.environ, "TF_NUM_INTRAOP_THREADS", variable)
    else:
        monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    threads._set("intra", 2)
    assert set_to == ([] if variable or chosen else [2])


def test_threads_of_a_tensorflow_that_has_started_stay(monkeypatch):
    def refuse(threads):
        raise RuntimeError

    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 0)
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", refuse)
    threads._set("intra", 2)
