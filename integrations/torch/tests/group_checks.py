"""Creates and destroys thousands of groups, also with messages in progress."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import keras_ddl.torch  # noqa: F401  (registers the backend)
from harness.rank_program import long, skip

if not dist.is_initialized():
    dist.init_process_group("ddl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def create_and_destroy(count):
    """Creates and destroys groups; returns the handles of their MPI communicators for messages."""
    handles = set()
    for _ in range(count):
        group = dist.new_group()
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert (tensor == SIZE).all()
        if SIZE > 1:
            handles.add(group._peers._messages._comm.py2f())
        dist.destroy_process_group(group)
    return handles


def held():
    return [len(list(Path(f"/proc/self/{each}").iterdir())) for each in ("fd", "task")]


def await_held(before):
    """Waits for the threads of a group, which end shortly after the group."""
    end = time.monotonic() + 60
    while max(after - each for after, each in zip(held(), before)) > 2:
        assert time.monotonic() < end, (before, held())
        time.sleep(0.05)


def resident_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def check_groups_leave_nothing_behind():
    if SIZE == 1:
        skip("one rank has no communicators of MPI")
    create_and_destroy(5)
    before = held()
    assert len(create_and_destroy(40)) < 20  # MPI reuses handles of freed communicators
    await_held(before)


@long
def check_five_thousand_groups():
    create_and_destroy(100)
    before, memory = held(), resident_mb()
    create_and_destroy(5000 if SIZE == 2 else 1000)
    await_held(before)
    assert resident_mb() - memory < 20


def check_groups_of_several_members_are_created_and_destroyed():
    # Ranks leave in different orders, and create different groups next.
    for turn in range(20):
        kept = []
        for members in ([0, SIZE - 1], list(range(SIZE)), [turn % SIZE]):
            group = dist.new_group(sorted(set(members)))
            if RANK in members:
                tensor = torch.full((5,), float(turn))
                dist.all_reduce(tensor, group=group)
                assert (tensor == turn * len(set(members))).all()
                kept.append(group)
        for group in kept if RANK % 2 else reversed(kept):
            dist.destroy_process_group(group)
    dist.barrier()


def check_destroying_a_group_with_messages_in_progress():
    if SIZE == 1:
        skip("one rank has nobody to send to")
    for turn in range(10):
        group = dist.new_group()
        if RANK == 0:
            dist.isend(torch.full((3,), -1.0), 1, group=group, tag=5)  # never received
            if turn == 9:
                work = dist.irecv(torch.empty(3), SIZE - 1, group=group)
        dist.destroy_process_group(group)
        if RANK == 0 and turn == 9:
            with pytest.raises(dist.DistBackendError, match="before its group was shut down"):
                work.wait()
        another = dist.new_group()
        if RANK == 0:
            dist.send(torch.full((3,), float(turn)), 1, group=another, tag=5)
        elif RANK == 1:
            tensor = torch.empty(3)
            dist.recv(tensor, 0, group=another, tag=5)
            assert (tensor == turn).all()
        dist.destroy_process_group(another)
    dist.barrier()


def check_callback_waits_for_a_collective_that_it_starts():
    # as PowerSGD's does
    results = []

    def again(done):
        tensor = torch.full((2000,), 1.0)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        results.append(tensor)
        return done.value()

    future = dist.all_reduce(torch.ones(300_000), async_op=True).get_future().then(again)
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    assert (results[0] == SIZE).all()


def check_many_works_at_once():
    tensors = [torch.ones(1 + turn % 50) for turn in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert all((tensor == SIZE).all() for tensor in tensors)
