"""Communicators made by `split`, for arrays and objects. Run by test_collectives.py."""

import pickle
import threading
import time

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import skip
from keras_ddl import communicator, errors

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
WORLD_GROUP = keras_ddl.topology().group


def members(comm) -> list[int]:
    """Returns the world ranks that the communicator connects, in the order of its own ranks."""
    return comm.all_gather_object(RANK)


def check_colors_choose_and_keys_order_the_ranks():
    comm = keras_ddl.split(RANK % 2, key=-RANK)
    expected = [rank for rank in range(SIZE - 1, -1, -1) if rank % 2 == RANK % 2]
    assert members(comm) == expected == list(comm.world_ranks)
    assert (comm.rank, comm.size) == (expected.index(RANK), len(expected))
    assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size), "the tests run on one host"
    assert (comm.topology.rank, comm.topology.size) == (comm.rank, comm.size)
    comm.close()
    with keras_ddl.split("all", name="everyone") as same:
        assert members(same) == list(range(SIZE)), "equal keys keep the order"
        assert same.topology.group == WORLD_GROUP
    some = keras_ddl.split(None if RANK == 0 else 7)
    assert (some is None) == (RANK == 0)
    if some is not None:
        assert members(some) == list(range(1, SIZE))
    assert keras_ddl.split(None) is None


def check_every_collective_works_in_a_split_communicator():
    with keras_ddl.split(RANK * 2 // SIZE, name="half") as half:
        ranks = list(half.world_ranks)
        for count in (0, 1, 7, 70_001):
            total = half.all_reduce_array(np.full(count, float(RANK)))
            np.testing.assert_array_equal(total, np.full(count, float(sum(ranks))))
            by_function = communicator.all_reduce_array(np.full(count, RANK), "max", comm=half)
            np.testing.assert_array_equal(by_function, np.full(count, max(ranks)))
        for root in range(half.size):
            assert half.broadcast_object(f"from {RANK}", root) == f"from {ranks[root]}"
            assert keras_ddl.broadcast_object(RANK, root, comm=half) == ranks[root]
            np.testing.assert_array_equal(half.broadcast_array(np.full(9, RANK), root), np.full(9, ranks[root]))
            assert communicator.broadcast_array(RANK, root, comm=half) == ranks[root]
        assert keras_ddl.all_gather_object(RANK, comm=half) == ranks
        half.barrier()
        keras_ddl.barrier(comm=half)
        groups = len({WORLD_GROUP[rank] for rank in ranks})
        assert half.describe().startswith(f"{groups} group"), half.describe()
        array = np.full(1000, float(RANK), np.float32)
        assert half.all_reduce_array(array, "mean", out=array) is array


def check_split_communicators_do_not_wait_for_each_other():
    half = keras_ddl.split(RANK % 2)
    if RANK % 2:  # enters its barrier only after the others have left theirs
        keras_ddl.barrier("even ranks have met")
        half.barrier()
    else:
        half.barrier()
        keras_ddl.barrier("even ranks have met")
    half.close()
    keras_ddl.barrier()


def check_nested_splits():
    whole, depth, comms = None, 0, []
    while (keras_ddl.size() if whole is None else whole.size) > 1:
        parent = whole if whole is not None else communicator.communicator_of(None)
        whole = parent.split(parent.rank * 2 // parent.size, name=f"depth {depth}")
        comms.append(whole)
        first = RANK - whole.rank
        assert members(whole) == list(range(first, first + whole.size))
        depth += 1
    for number, comm in enumerate(comms):
        assert comm.all_reduce_array(np.float64(1)) == comm.size, number
    # A parent may be closed before its children.
    for comm in comms:
        comm.close()
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))


def check_mismatch_in_one_communicator_leaves_the_others_usable():
    if SIZE < 4:
        skip("needs four ranks")
    half, whole = keras_ddl.split(RANK % 2, name="half"), keras_ddl.split(0, name="whole")
    if RANK % 2:
        with pytest.raises(
            errors.RankMismatchError, match=r"half/.*ranks of communicator 'half'.*ranks 1, 3.* of the job"
        ):
            half.all_reduce_array(np.ones(3 + half.rank), name="wrong")
    else:
        assert half.all_reduce_array(np.ones(1))[0] == half.size
    for comm in (half, whole, None):
        size = SIZE if comm is None else comm.size
        np.testing.assert_array_equal(communicator.all_reduce_array(np.ones(5), comm=comm), np.full(5, size))
    half.close()
    whole.close()


def check_closing_a_communicator_also_fails_waiting_ranks():
    comm = keras_ddl.split(0, name="short")
    comm.barrier()
    if RANK == 0:
        comm.close()
    else:
        with pytest.raises(errors.RankLostError, match="has left.*communicator 'short'"):
            comm.barrier("never")
    keras_ddl.barrier()
    comm.close()
    comm.close()
    for call in (comm.barrier, lambda: keras_ddl.barrier(comm=comm), lambda: comm.split(0), comm.describe):
        with pytest.raises(errors.NotInitializedError, match="'short' is closed"):
            call()
    assert "closed" in repr(comm)
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))


def check_invalid_arguments_are_errors_on_every_rank():
    last = RANK == SIZE - 1
    mixed = rf"all strings.*int on rank.*str on rank\(s\) \[{SIZE - 1}\]"
    for call, text in (
        (lambda: keras_ddl.split(1.5 if last else 1), rf"color must be an integer, a string.*rank {SIZE - 1}"),
        (lambda: keras_ddl.split(1, key="first" if last else 0), rf"key must be an integer.*rank {SIZE - 1}"),
        (lambda: keras_ddl.split(True), "color must be an integer"),
        *([(lambda: keras_ddl.split("a" if last else 1), mixed)] if SIZE > 1 else []),
        (lambda: keras_ddl.split(0, name="n" * 81), "name must be a string"),
        (lambda: keras_ddl.barrier(comm=3), "comm must be a communicator.*Received: comm=3"),
        (lambda: pickle.dumps(keras_ddl.split(RANK)), "belongs to the process"),
        (lambda: communicator.communicator_of(None).close(), "only keras_ddl.shutdown"),
        (lambda: keras_ddl.split(0).broadcast_object(1, root=SIZE), f"0 to {SIZE - 1}.*root={SIZE}"),
    ):
        with pytest.raises(errors.ConfigError, match=text):
            call()
    keras_ddl.barrier()


def check_named_splits_from_several_threads():
    made = {}

    def make(number: int) -> None:
        comm = keras_ddl.split(RANK % 2 if number % 2 else 0, name=f"thread {number}")
        made[number] = comm
        assert comm.all_reduce_array(np.ones(10))[0] == comm.size

    order = np.random.default_rng(RANK).permutation(4)
    threads = [threading.Thread(target=make, args=(int(number),)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [0, 1, 2, 3]
    assert len({comm.id for comm in made.values()}) == 4
    ids = keras_ddl.all_gather_object([made[number].id for number in (0, 2)])
    assert all(other == ids[0] for other in ids), "an id is the same on all ranks of the communicator"
    for number in range(4):
        made[number].close()


def check_many_successive_splits_leave_nothing_behind():
    from pathlib import Path

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    def use() -> None:
        with keras_ddl.split(RANK % 2) as comm:
            comm.barrier()

    use()
    keras_ddl.barrier()
    time.sleep(0.2)  # lets threads end; if they end later, the limit below is stricter
    before = held()
    for _ in range(20):
        use()
    keras_ddl.barrier()
    deadline = time.monotonic() + 30
    while any(now > then + 1 for now, then in zip(held(), before)):
        assert time.monotonic() < deadline, (before, held())
        time.sleep(0.05)


def check_shutdown_closes_all_and_init_starts_anew():
    mode = keras_ddl.topology().mode
    old = keras_ddl.split(0, name="old")
    old.barrier()
    keras_ddl.barrier()
    keras_ddl.shutdown()
    with pytest.raises(errors.NotInitializedError, match=r"keras_ddl.init\(\)"):
        old.barrier()
    with pytest.raises(errors.NotInitializedError, match=r"keras_ddl.init\(\)"):
        keras_ddl.split(0)
    keras_ddl.init(mode)
    new = keras_ddl.split(0, name="old")
    assert new.id != old.id
    assert members(new) == list(range(SIZE))
    new.close()
