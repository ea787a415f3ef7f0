"""The contract of the collectives on NumPy arrays: any order, any thread, any count; any value: native/tests/kernels.

Run by test_collectives.py. Every rank computes every rank's input, so NumPy on one rank is the oracle for all of them.
"""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import keras_ddl
from keras_ddl import communicator, errors

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()


def same_on_all_ranks(data: bytes) -> bool:
    return len(set(keras_ddl.all_gather_object(hashlib.sha256(data).digest()))) == 1


def check_two_hundred_in_a_different_order_on_each_rank_from_several_threads():
    # A blocking call needs a thread of its own: with fewer, ranks could wait for one another in a circle.
    order = np.random.default_rng(RANK).permutation(200)

    def reduce(number: int) -> np.ndarray:
        return communicator.all_reduce_array(np.full(1 + number * 37 % 500, number * 10.0 + RANK), name=f"job {number}")

    with ThreadPoolExecutor(200) as threads:
        futures = {number: threads.submit(reduce, number) for number in order}
        for number, future in futures.items():
            expected = np.full(1 + number * 37 % 500, number * 10.0 * SIZE + sum(range(SIZE)))
            np.testing.assert_array_equal(future.result(), expected)


def check_threads_that_wait_long_for_one_another_are_no_mismatch():
    """Each rank's thread waits in a collective that the others reach only after 1.5 s: nothing is wrong with that."""

    def late(number: int) -> np.ndarray:
        time.sleep(0 if number % SIZE == RANK else 1.5)
        return communicator.all_reduce_array(np.ones(3), name=f"late {number}")

    with ThreadPoolExecutor(SIZE) as threads:
        for result in threads.map(late, range(SIZE)):
            np.testing.assert_array_equal(result, np.full(3, SIZE))


def check_counts_that_do_not_divide():
    for count in (SIZE - 1, SIZE + 1, 127, 1_000_003):
        inputs = [((np.arange(count) + 3 * rank) % 5).astype(np.int8) for rank in range(SIZE)]
        actual = communicator.all_reduce_array(inputs[RANK])
        np.testing.assert_array_equal(actual, np.sum(inputs, axis=0, dtype=np.int8), err_msg=f"{count}")
        assert same_on_all_ranks(actual.tobytes())
    for length in (0, SIZE - 1, 8191):
        lengths = [length * (rank % 2) + rank for rank in range(SIZE)]
        assert [len(part) for part in keras_ddl.all_gather_object(b"." * lengths[RANK])] == lengths


def check_unaligned_buffers():
    for dtype in (np.dtype(np.float32), np.dtype(np.int64)):
        for count in (1, 70_001):
            shift = 1
            memory = np.zeros(count * dtype.itemsize + 16, np.uint8)
            array = memory[shift : shift + count * dtype.itemsize].view(dtype)
            array[:] = (np.arange(count) % 7 + RANK).astype(dtype)
            expected = sum(np.arange(count) % 7 + rank for rank in range(SIZE)).astype(dtype)
            np.testing.assert_array_equal(communicator.all_reduce_array(array), expected)
            before = array.copy()
            result = communicator.all_reduce_array(array, out=array)
            assert result.ctypes.data == array.ctypes.data, "in place, not copied"
            np.testing.assert_array_equal(array, expected)
            assert not memory[:shift].any()
            assert not memory[shift + count * dtype.itemsize :].any(), "written beyond the end"
            np.testing.assert_array_equal(communicator.broadcast_array(before, SIZE - 1)[:1], [SIZE - 1])


def check_a_mismatch_among_many_breaks_that_one_alone():
    jobs = np.random.default_rng(RANK + 7).permutation(40)

    def reduce(number: int) -> np.ndarray:
        wrong = number % 10 == 3 and RANK == SIZE - 1
        return communicator.all_reduce_array(np.full(5 + wrong, float(number)), name=f"some {number}")

    with ThreadPoolExecutor(40) as threads:
        for number, future in {int(number): threads.submit(reduce, int(number)) for number in jobs}.items():
            if number % 10 == 3 and SIZE > 1:
                with pytest.raises(errors.RankMismatchError, match=rf"some {number}.*{SIZE - 1}"):
                    future.result()
            else:
                np.testing.assert_array_equal(future.result()[:5], np.full(5, number * SIZE))
