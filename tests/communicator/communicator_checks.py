"""Checks of keras_ddl.communicator against NumPy; every rank computes every rank's input."""

import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import keras_ddl
from communicator.oracle import COUNTS, DTYPES, OPS, assert_reduced, input_of, reduced
from harness.rank_program import rank as launcher_rank
from harness.rank_program import size as launcher_size
from harness.rank_program import skip
from keras_ddl import communicator, errors
from keras_ddl.communicator.native import requests

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()


def check_identity_comes_from_the_launcher():
    assert (launcher_rank(), launcher_size()) == (RANK, SIZE)
    place = keras_ddl.topology()
    assert (place.rank, place.size) == (RANK, SIZE)
    assert (keras_ddl.local_rank(), keras_ddl.local_size(), keras_ddl.num_hosts()) == (RANK, SIZE, 1)
    assert keras_ddl.is_initialized()
    assert "rank" in communicator.describe()


def check_shared_memory_groups_follow_the_mode():
    mode = os.environ.get("KERAS_DDL_MODE")
    sharing = SIZE if mode is None else int(mode.removeprefix("x:").split("x")[0])
    assert list(keras_ddl.topology().group) == [rank - rank % sharing for rank in range(SIZE)]


def check_second_init_returns_the_same_and_refuses_another_mode():
    assert keras_ddl.init() is keras_ddl.topology()
    assert keras_ddl.init(keras_ddl.topology().mode) is keras_ddl.topology()
    with pytest.raises(errors.ConfigError, match="mode of a running job cannot change.*Received: mode='x:7x7'"):
        keras_ddl.init("x:7x7")


def check_all_reduce_array_and_plain_mpi_equal_numpy_for_every_dtype_and_op():
    comm = communicator.communicator_of(None).native()
    for dtype, op in itertools.product(DTYPES, OPS):
        arrays = [input_of(rank, dtype, 1000, op) for rank in range(SIZE)]
        before = arrays[RANK].copy()
        assert_reduced(communicator.all_reduce_array(arrays[RANK], op), arrays, op)
        assert_reduced(
            comm.all_reduce(arrays[RANK], op, f"plain {dtype} {op}", flags=requests.FLAG_PLAIN_MPI), arrays, op
        )
        np.testing.assert_array_equal(arrays[RANK].view(np.uint8), before.view(np.uint8))  # the input is unchanged


def check_plain_mpi_carries_nan_infinity_and_rounding():
    comm = communicator.communicator_of(None).native()
    for name, op in itertools.product(("float16", "bfloat16", "float64"), ("min", "sum")):
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        special = np.array([np.nan, np.inf, -np.inf, 1e-7, 65504, 1 + 2**-9, -0.0, 3e-8, 70000], np.float64)
        for odd_one in range(SIZE):
            array = (special if odd_one == RANK else np.zeros_like(special)).astype(dtype)
            actual = comm.all_reduce(array, op, f"special {name} {op} {odd_one}", flags=requests.FLAG_PLAIN_MPI)
            zeros = np.zeros_like(special).astype(dtype)
            expected = reduced([special.astype(dtype)] + [zeros] * (SIZE - 1), op)
            np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))


def check_all_reduce_array_takes_scalars_lists_and_strides():
    assert communicator.all_reduce_array(np.float64(RANK)).shape == ()
    np.testing.assert_array_equal(communicator.all_reduce_array([RANK, 1], "sum"), [sum(range(SIZE)), SIZE])
    array = np.arange(24.0).reshape(4, 6).T[::2]
    np.testing.assert_array_equal(communicator.all_reduce_array(array, "max"), array)
    assert communicator.all_reduce_array(np.zeros((0, 3))).shape == (0, 3)


def check_unaligned_arrays_and_in_place():
    for dtype, count in itertools.product((np.dtype(np.float32), np.dtype(np.int64)), (1, 70_001)):
        memory = np.zeros(count * dtype.itemsize + 16, np.uint8)
        array = memory[1 : 1 + count * dtype.itemsize].view(dtype)
        array[:] = (np.arange(count) % 7 + RANK).astype(dtype)
        expected = sum(np.arange(count) % 7 + rank for rank in range(SIZE)).astype(dtype)
        np.testing.assert_array_equal(communicator.all_reduce_array(array), expected)
        assert communicator.broadcast_array(array, SIZE - 1)[0] == SIZE - 1
        assert communicator.all_reduce_array(array, out=array).ctypes.data == array.ctypes.data, "in place, not copied"
        np.testing.assert_array_equal(array, expected)
        assert memory[0] == 0 and not memory[1 + count * dtype.itemsize :].any(), "written beyond the ends"


def check_long_waits_for_threads_are_no_mismatch():
    """Each rank's thread waits in a collective that the others reach only after 1.5 s, which is not an error."""

    def late(number: int) -> np.ndarray:
        time.sleep(0 if number % SIZE == RANK else 1.5)
        return communicator.all_reduce_array(np.ones(3), name=f"late {number}")

    with ThreadPoolExecutor(SIZE) as threads:
        for result in threads.map(late, range(SIZE)):
            np.testing.assert_array_equal(result, np.full(3, SIZE))


def check_all_reduce_init_reads_its_array_in_every_call():
    for count in COUNTS:
        array = np.zeros(count, np.float32)
        reduce = communicator.all_reduce_init(array, "mean", name=f"persistent {count}")
        for turn in range(3):
            array[:] = RANK + turn
            if turn == 1 and RANK == 0:
                time.sleep(0.01)  # longer than the others wait before they pass it to the communication thread
            result = reduce()
            np.testing.assert_array_equal(result, np.full(count, (SIZE - 1) / 2 + turn, np.float32))
    in_place = np.arange(5.0)
    assert communicator.all_reduce_init(in_place, out=in_place)() is in_place
    np.testing.assert_array_equal(in_place, np.arange(5.0) * SIZE)
    for array in ([1.0, 2.0], np.ones((4, 4))[:, ::2]):  # these could not be read again
        with pytest.raises(errors.ConfigError, match="C-contiguous"):
            communicator.all_reduce_init(array)


def check_broadcast_array_takes_every_dtype_from_every_root():
    arrays = [
        np.arange(5, dtype=np.float32),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.array([b"ab", b"c"]),
        np.zeros((3, 0)),
        np.array(7, ">i4"),
        np.arange(6).reshape(2, 3).T,
        np.arange(3).astype(ml_dtypes.bfloat16),
    ]
    for root, array in itertools.product({0, SIZE - 1}, arrays):
        mine = array if root == RANK else np.zeros_like(array)
        actual = communicator.broadcast_array(mine, root)
        assert actual.dtype == array.dtype
        assert actual.shape == array.shape
        assert actual.tobytes() == array.tobytes()


def check_broadcast_object_takes_any_object_from_every_root():
    offset = 3
    objects = [None, {"a": [1, (2, 3)]}, b"", "x" * 3_000_000, lambda: offset + 4]
    for root in range(SIZE):
        for obj in objects:
            actual = keras_ddl.broadcast_object(obj if root == RANK else "ignored", root)
            assert actual() == 7 if callable(obj) else actual == obj


def check_all_gather_object_takes_objects_of_different_sizes():
    actual = keras_ddl.all_gather_object([RANK] * (RANK * 10_000), name="sizes")
    assert actual == [[rank] * (rank * 10_000) for rank in range(SIZE)]


def check_object_that_cannot_be_pickled_is_an_error_on_every_rank():
    bad = threading.Lock()
    with pytest.raises(errors.ConfigError, match=f"picklable. Received on rank {SIZE - 1}: lock"):
        keras_ddl.broadcast_object(bad if RANK == SIZE - 1 else None, root=SIZE - 1)
    with pytest.raises(errors.ConfigError, match="picklable. Received on rank 0: lock"):
        keras_ddl.all_gather_object(bad if RANK == 0 else 1)
    assert keras_ddl.broadcast_object(5) == 5


def check_barrier_waits_for_the_last_rank():
    time.sleep(0.1 * RANK)
    arrived = time.monotonic()
    keras_ddl.barrier()
    left = time.monotonic()
    times = keras_ddl.all_gather_object((arrived, left))
    assert max(a for a, _ in times) <= min(b for _, b in times)


def check_mismatch_is_an_error_on_every_rank_and_the_next_call_works():
    if SIZE == 1:
        skip("needs two ranks")
    last = RANK == SIZE - 1
    ones = np.ones(4, np.float32)
    cases = {
        "dtype": (
            lambda: communicator.all_reduce_array(ones.astype(np.float64) if last else ones, name="m"),
            "float64",
        ),
        "shape": (lambda: communicator.all_reduce_array(np.ones(5, np.float32) if last else ones, name="m"), r"\[5\]"),
        "order": (lambda: communicator.all_reduce_array(ones.reshape(2, 2) if last else ones, name="m"), r"\[2, 2\]"),
        "op": (lambda: communicator.all_reduce_array(ones, "max" if last else "sum", name="m"), "max"),
        "root": (lambda: communicator.broadcast_array(ones, SIZE - 1 if last else 0, name="m"), "root"),
        "object root": (lambda: keras_ddl.broadcast_object(1, SIZE - 1 if last else 0, name="m"), "from root 0"),
        "persistent": (lambda: communicator.all_reduce_init(np.ones(3 if last else 4), name="m")(), "elements"),
        "length": (lambda: communicator.broadcast_array(np.zeros(2 if last else 3, bool), name="m"), "bool"),
    }
    for call, text in cases.values():
        with pytest.raises(errors.RankMismatchError, match=text) as caught:
            call()
        assert f"{SIZE - 1}" in str(caught.value)
        messages = keras_ddl.all_gather_object(str(caught.value))
        assert len(set(messages)) == 1, messages
        np.testing.assert_array_equal(communicator.all_reduce_array(ones), ones * SIZE)


def check_bad_arguments_are_errors_before_anything_is_sent():
    ones = np.ones(1)
    for call, text in (
        (
            lambda: keras_ddl.broadcast_object(1, root=SIZE),
            f"0 to {SIZE - 1}. Received: root={SIZE}",
        ),
        (lambda: communicator.broadcast_array(ones, root=-1), "Received: root=-1"),
        (lambda: communicator.all_reduce_array(ones, op="add"), "op must be one of 'sum'.*Received: op='add'"),
        (lambda: communicator.all_reduce_array(ones.astype(complex)), "dtype must be one of float32.*complex128"),
        (lambda: communicator.all_reduce_array(ones.astype(">f4")), "native byte order"),
        (lambda: communicator.broadcast_array(np.array([object()])), "Use broadcast_object"),
        (lambda: keras_ddl.barrier("n" * 5000), "name"),
    ):
        with pytest.raises(errors.ConfigError, match=text):
            call()


def call_interrupted(call, *arguments, **named):
    """Makes a call and interrupts it as Ctrl-C would."""

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    with pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        call(*arguments, **named)
    signal.signal(signal.SIGALRM, previous)


def check_interrupted_wait_leaves_the_collective_running():
    if SIZE == 1:
        skip("needs two ranks")
    keras_ddl.barrier()
    if RANK != 0:
        call_interrupted(communicator.all_reduce_array, np.ones(1000), name="interrupted")
    # On rank 0, not in its main thread, too: blocked in two collectives, the ranks would deadlock.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(keras_ddl.barrier, "all have been interrupted").result()
    if RANK == 0:
        np.testing.assert_array_equal(communicator.all_reduce_array(np.ones(1000), name="interrupted"), [SIZE] * 1000)
    keras_ddl.barrier()


def check_interrupt_ends_the_wait_for_a_join_but_not_the_join():
    with keras_ddl.split(0) as beside:
        for ends_first in (False, True):  # before the others wait for it again
            if RANK != 0:
                call_interrupted(keras_ddl.join)
                with pytest.raises(errors.RankMismatchError, match=f"rank {RANK}, which has joined"):
                    keras_ddl.barrier()
            beside.barrier()
            if RANK == 0:
                assert communicator.all_reduce_array([5]) == [5]
                assert keras_ddl.join() == 0
            if ends_first:
                beside.barrier()
            if RANK != 0:
                assert keras_ddl.join() == 0
            keras_ddl.barrier()


def check_join_allows_unequal_numbers_of_calls():
    for turn in range(2):
        for step in range(2 * RANK + turn):
            present = [rank for rank in range(SIZE) if 2 * rank + turn > step]
            keras_ddl.barrier()
            total = communicator.all_reduce_array(np.full(1000, RANK + 1.0))
            np.testing.assert_array_equal(total, np.full(1000, sum(present) + len(present)))
            assert communicator.all_reduce_array([RANK + 1.0], "mean")[0] == total[0] / SIZE
            assert communicator.all_reduce_array([RANK + 1], "min") == [present[0] + 1]
            assert communicator.broadcast_array([RANK], SIZE - 1) == [SIZE - 1]
        assert keras_ddl.join() == SIZE - 1
        # Unnamed calls are numbered alike again.
        keras_ddl.barrier()
        assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))


def check_collective_that_needs_a_joined_rank_fails_on_the_others():
    if SIZE == 1:
        skip("needs two ranks")
    if RANK != 0:
        for wrong in (
            lambda: keras_ddl.all_gather_object(RANK),
            lambda: keras_ddl.broadcast_object(RANK, root=SIZE - 1),
            lambda: communicator.broadcast_array(np.ones(3), root=0),
            lambda: keras_ddl.split(0),
        ):
            with pytest.raises(errors.RankMismatchError, match=r"rank\(s\) 0 have joined"):
                wrong()
            assert communicator.all_reduce_array([1]) == [SIZE - 1]
    assert 0 < keras_ddl.join() < SIZE
    keras_ddl.barrier()


def check_shutdown_can_be_followed_by_init():
    mode = keras_ddl.topology().mode
    keras_ddl.barrier()
    keras_ddl.shutdown()
    assert not keras_ddl.is_initialized()
    with pytest.raises(errors.NotInitializedError, match="init"):
        keras_ddl.rank()
    with pytest.raises(errors.NotInitializedError, match="init"):
        keras_ddl.barrier()
    for again in (f"x:1x{SIZE}", "p", f"x:1x{SIZE}", mode):  # messages of one communicator must not reach the next
        keras_ddl.init(again)
        assert communicator.all_reduce_array(np.ones(3)).tolist() == [SIZE] * 3
        keras_ddl.barrier()
        keras_ddl.shutdown()
    keras_ddl.init(mode)
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))


def check_forked_child_is_not_a_rank():
    child = os.fork()
    if child == 0:
        status = 1
        try:
            keras_ddl.barrier()
        except errors.NotInitializedError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))
