"""The number of TensorFlow threads per rank."""

import os

import pytest

from harness.rank_program import rank
from harness.rank_tests import run_ranks
from keras_ddl.device import threads_of


def test_threads_are_the_ranks_share_of_cores():
    everything = range(8)
    assert [threads_of(r, (0, 0, 0, 1), [everything] * 4) for r in range(4)] == [2, 2, 2, None]
    assert threads_of(0, (0,) * 16, [everything] * 16) == 1


def test_threads_of_bound_ranks_match_their_cores():
    sockets = [range(4), range(4), range(4, 8), range(4, 8)]
    assert [threads_of(r, (0,) * 4, sockets) for r in range(4)] == [2] * 4
    assert [threads_of(r, (0,) * 4, [[r] for r in range(4)]) for r in range(4)] == [None] * 4


@pytest.mark.long
@pytest.mark.parallel
def test_chosen_numbers_of_threads_are_kept():
    """Rank 0's script and rank 1's environment choose the number; on rank 2 TensorFlow has already started."""

    def threads_of_a_strategy():
        if rank() == 1:
            os.environ["TF_NUM_INTRAOP_THREADS"] = "4"
        import tensorflow as tf

        if rank() == 0:
            tf.config.threading.set_intra_op_parallelism_threads(3)
        elif rank() == 2:
            tf.constant(1.0) + 1.0
        import keras_ddl

        keras_ddl.Strategy()
        return tf.config.threading.get_intra_op_parallelism_threads()

    outcome = run_ranks(threads_of_a_strategy, 3).check()
    assert [each.result for each in outcome.ranks] == [3, 0, 0]  # 0: nothing in this process set it
