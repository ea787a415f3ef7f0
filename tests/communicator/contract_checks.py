"""The contract of the collectives on NumPy arrays: any order, any thread, any count, any value.

Run by test_collectives.py. Every rank computes every rank's input, so NumPy on one rank is the oracle for all of them.
"""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import keras_ddl
from keras_ddl import communicator, errors

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
FLOATS = [np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


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


def check_kinds_mixed_in_different_orders():
    def run(kind: str, number: int):
        name = f"{kind} {number}"
        if kind == "sum":
            return communicator.all_reduce_array(np.arange(number * 100), name=name)[-1:].tolist()
        if kind == "broadcast":
            return communicator.broadcast_array(np.full(5, RANK), number % SIZE, name).tolist()
        if kind == "gather":
            return communicator.all_gather_object("x" * RANK * number, name)
        return communicator.barrier(name)

    expected = {
        "sum": lambda number: [(number * 100 - 1) * SIZE],
        "broadcast": lambda number: [number % SIZE] * 5,
        "gather": lambda number: ["x" * rank * number for rank in range(SIZE)],
        "barrier": lambda number: None,
    }
    jobs = [(kind, number) for kind in expected for number in range(1, 26)]
    np.random.default_rng(RANK + 1).shuffle(jobs)
    with ThreadPoolExecutor(len(jobs)) as threads:
        for (kind, number), future in [(job, threads.submit(run, job[0], int(job[1]))) for job in jobs]:
            assert future.result() == expected[kind](int(number)), (kind, number)


def check_counts_that_do_not_divide():
    for count in (0, 1, SIZE - 1, SIZE, SIZE + 1, 7, 127, 4099, 65_537, 1_000_003):
        for dtype in (np.int8, np.float32):
            inputs = [((np.arange(count) + 3 * rank) % 5).astype(dtype) for rank in range(SIZE)]
            actual = communicator.all_reduce_array(inputs[RANK])
            np.testing.assert_array_equal(actual, np.sum(inputs, axis=0, dtype=dtype), err_msg=f"{count} {dtype}")
            assert same_on_all_ranks(actual.tobytes())
    for length in (0, 1, SIZE - 1, 8191):
        lengths = [length * (rank % 2) + rank for rank in range(SIZE)]
        assert [len(part) for part in keras_ddl.all_gather_object(b"." * lengths[RANK])] == lengths


def check_unaligned_buffers():
    for dtype in (*FLOATS, np.dtype(np.int64)):
        for count in (1, 63, 70_001):
            for shift in (1, 3):
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


def check_nan_and_infinity_pass_through():
    for dtype in FLOATS:
        for count in (1, 1000, 70_001):
            for odd_one in range(SIZE):
                array = np.ones(count, dtype)
                if odd_one == RANK:
                    array[:: max(1, count // 9)] = np.nan
                    array[1::11] = np.inf
                    array[2::13] = -np.inf
                marks = communicator.broadcast_array(array, odd_one)
                nan, inf = np.isnan(marks), np.isinf(marks)
                for op in ("sum", "mean", "min", "max", "product"):
                    result = communicator.all_reduce_array(array, op)
                    what = f"{dtype} {op} {count} from rank {odd_one}"
                    assert np.isnan(result[nan]).all(), what
                    # The least of 1 and Inf is 1, the largest of 1 and -Inf too.
                    keeps = inf & {"min": np.signbit(marks), "max": ~np.signbit(marks)}.get(op, True)
                    np.testing.assert_array_equal(result[keeps], marks[keeps], err_msg=what)
                    np.testing.assert_array_equal(np.isfinite(result), ~nan & ~keeps, err_msg=what)
                    assert same_on_all_ranks(result.tobytes()), what
        if SIZE > 1:
            opposites = np.full(99, np.inf if RANK == 0 else -np.inf if RANK == 1 else 0.0).astype(dtype)
            assert np.isnan(communicator.all_reduce_array(opposites)).all()


def check_denormals_and_negative_zero_are_kept():
    for dtype in FLOATS:
        info = ml_dtypes.finfo(dtype)
        for count in (1, 70_001):
            tiny = np.full(count, info.smallest_subnormal, dtype)
            expected = (np.full(count, info.smallest_subnormal, np.float64) * SIZE).astype(dtype)
            assert expected[0] > 0
            np.testing.assert_array_equal(communicator.all_reduce_array(tiny), expected)
            for op in ("min", "max"):
                np.testing.assert_array_equal(communicator.all_reduce_array(tiny, op), tiny, err_msg=f"{dtype} {op}")
            # Between hosts, 16-bit sums are rounded to 16 bits, float16 ones after they were scaled.
            mean = communicator.all_reduce_array((tiny * 1000).astype(dtype), "mean")
            steps = mean.astype(np.float64) / float(info.smallest_subnormal)
            narrow = dtype.itemsize == 2
            np.testing.assert_allclose(
                steps, 1000, atol=SIZE if narrow else 0, rtol=2 * float(info.eps) if narrow else 0
            )
            zeros = np.full(count, -0.0, dtype)
            for op in ("sum", "mean", "min", "max"):
                assert np.signbit(communicator.all_reduce_array(zeros, op)).all(), f"{dtype} {op}"
            assert not np.signbit(communicator.all_reduce_array(zeros if RANK else -zeros)).any()
            mixed = communicator.all_reduce_array(zeros if RANK else -zeros, "min")
            assert (mixed == 0).all()
            assert same_on_all_ranks(mixed.tobytes())


def check_float16_means_do_not_overflow_as_sums():
    for value in (60_000.0, -65_504.0):
        for count in (1, 1000, 70_001):
            array = np.full(count, value, np.float16)
            np.testing.assert_array_equal(communicator.all_reduce_array(array, "mean"), array, err_msg=str(count))
    for dtype in FLOATS:
        largest = np.full(1000, ml_dtypes.finfo(dtype).max, dtype)
        assert np.isinf(communicator.all_reduce_array(largest)).all() or SIZE == 1, "a sum does overflow"


def check_bitwise_equal_on_all_ranks_and_every_time():
    for dtype in FLOATS:
        for count in (3, 1000, 70_001, 1_000_003):
            array = np.random.default_rng([RANK, count]).standard_normal(count).astype(dtype)
            for op in ("sum", "mean", "product"):
                results = [communicator.all_reduce_array(array, op).tobytes() for _ in range(3)]
                assert len(set(results)) == 1, f"{dtype} {op} {count}: differs from call to call"
                assert same_on_all_ranks(results[0]), f"{dtype} {op} {count}: differs between ranks"


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
