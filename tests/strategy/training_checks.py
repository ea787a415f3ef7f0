"""Training under the Strategy equals training in one process. Run by test_strategy.py."""

import os

from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import (
    SIZE,
    WEIGHTS,
    X,
    Y,
    keras,
)
from strategy.oracle import check_equal_to_one_process


def check_tensorflow_has_this_ranks_share_of_the_cores():
    share = max(1, len(os.sched_getaffinity(0)) // SIZE)  # one host, and no rank is bound
    assert tf.config.threading.get_intra_op_parallelism_threads() == share
    assert tf.config.threading.get_inter_op_parallelism_threads() == max(2, share)


def sgd(**arguments):
    return lambda: keras.optimizers.SGD(0.05, **arguments)


def adam(**arguments):
    return lambda: keras.optimizers.Adam(0.01, **arguments)


@long
def check_sgd_20_steps_float32():
    check_equal_to_one_process(sgd(), fit={"epochs": 4}, dtype="float32")


@long
def check_sgd_20_steps_float64():
    check_equal_to_one_process(sgd(), fit={"epochs": 4})


@long
def check_adam_20_steps_float32():
    check_equal_to_one_process(adam(), fit={"epochs": 4}, dtype="float32")


def check_adam_20_steps_float64():
    check_equal_to_one_process(adam(), fit={"epochs": 4})


def check_uneven_batches_and_ranks_without_rows():
    # 43 = 4 * 10 + 3: the last batch has fewer rows than four ranks
    check_equal_to_one_process(sgd(), fit={"batch_size": max(SIZE, 5), "epochs": 1})


def check_batch_as_small_as_the_number_of_ranks():
    check_equal_to_one_process(adam(), fit={"batch_size": SIZE, "x": X[:9], "y": Y[:9]})


def check_sample_weight_and_weighted_metrics():
    check_equal_to_one_process(
        sgd(), compiled={"weighted_metrics": lambda: ["mae"]}, fit={"sample_weight": WEIGHTS, "validation_split": 0.2}
    )
