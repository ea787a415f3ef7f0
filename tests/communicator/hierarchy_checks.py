"""All-reduce over boxes of two and three dimensions, whose outer dimensions use MPI. Run by test_collectives.py."""

import os

import numpy as np

import keras_ddl
from keras_ddl.communicator import all_reduce_array, describe

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
MODE = os.environ["KERAS_DDL_MODE"]


def random_values(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=count).astype("float32")


def check_forced_box_is_built():
    dims = tuple(int(word) for word in MODE[2:].split("x"))
    assert keras_ddl.topology().dims == dims
    groups = SIZE // dims[0]
    assert f"{groups} groups" in describe(), describe()
    outer = "x".join(map(str, dims[1:]))
    assert (f"as {outer}" in describe()) == (len(dims) > 2), describe()


def check_many_blocks_equal_numpys_sum():
    # From fewer elements than chunks to many blocks in progress; the last block has an odd size.
    for count in (1, SIZE - 1, 5 * SIZE + 1, 4_000_037):
        expected = sum(random_values(rank, count).astype(np.float64) for rank in range(SIZE))
        actual = all_reduce_array(random_values(RANK, count))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
