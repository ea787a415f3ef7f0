"""Promises of backend "ddl": clear errors, groups that are created and destroyed, waits that end."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import keras_ddl.torch
from harness.rank_program import skip

if not dist.is_initialized():
    dist.init_process_group("ddl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def skip_if_alone():
    if SIZE == 1:
        skip("needs another rank")


def check_init_needs_no_address():
    assert "MASTER_ADDR" not in os.environ
    assert dist.get_backend() == "ddl"
    if SIZE > 1:  # set as torchrun does
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (str(RANK), str(RANK))
        assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == (str(SIZE), str(SIZE))


def check_refusals_name_the_call():
    sparse = torch.eye(3).to_sparse()
    whole = torch.ones(3, 4)
    refused = [
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int16)), "torch.int16"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG), "torch.bool"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.BAND), "BAND"),
        (lambda: dist.all_reduce(whole[:, :2]), r"strides \[4, 1\]"),
        (lambda: dist.all_gather_into_tensor(torch.ones(4 * SIZE, 3), whole.T), "contiguous"),
        (lambda: dist.all_reduce(sparse), "Embedding"),
        (lambda: dist.all_reduce(torch.ones(3, device="meta")), "CPU and CUDA tensors. Received: a tensor on meta"),
        (lambda: dist.all_gather_into_tensor(torch.ones(SIZE + 1), torch.ones(1)), "times as many elements"),
        (lambda: dist.all_to_all_single(torch.ones(SIZE), torch.ones(SIZE), [1] * SIZE, [2] * SIZE), "together"),
    ]
    for call, said in refused:
        with pytest.raises(ValueError, match=said):
            call()
    dist.barrier()  # nothing was sent


def check_tensors_on_two_devices_are_refused():
    # This needs no GPU, because the check only reads the tensor's device.
    from keras_ddl.errors import ConfigError
    from keras_ddl.torch import memory

    class OnGpu:
        device = torch.device("cuda:0")

    with pytest.raises(ConfigError, match=r"on one device. Received: cpu and cuda:0. Use tensor.to\(\)"):
        memory.check("all_reduce", [torch.ones(1, device="cpu"), OnGpu()])


def check_mismatch_fails_on_every_rank():
    skip_if_alone()
    last = RANK == SIZE - 1
    calls = [
        (lambda: dist.all_reduce(torch.ones(3 + last)), r"shape \[4\]"),
        (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if last else dist.ReduceOp.SUM), "max"),
        (lambda: dist.broadcast(torch.ones(3), int(last)), "root"),
        (lambda: dist.all_reduce(torch.ones(3)) if last else dist.broadcast(torch.ones(3), 0), "broadcast"),
        (lambda: dist.all_to_all_single(*[torch.ones(SIZE, dtype=torch.int16 if last else torch.bool)] * 2), "int16"),
        (lambda: dist.all_reduce(torch.ones(3 + last), async_op=True).wait(), r"shape \[4\]"),
    ]
    for call, said in calls:
        with pytest.raises(dist.DistBackendError, match=f"RankMismatchError.*{said}") as raised:
            call()
        assert f"rank(s) {SIZE - 1}" in str(raised.value)
    future = dist.all_reduce(torch.ones(3 + last), async_op=True).get_future()
    with pytest.raises(RuntimeError, match="RankMismatchError"):
        future.wait()
    dist.barrier()


def check_mismatched_splits_fail_on_receiver():
    skip_if_alone()
    output = torch.empty(2 * SIZE)
    with pytest.raises(dist.DistBackendError, match="the output sizes must equal the numbers"):
        dist.all_to_all_single(output, torch.ones(SIZE))
    dist.barrier()


def check_message_of_wrong_length_is_an_error():
    skip_if_alone()
    for sent, expected in ((3, 5), (5, 3)):
        if RANK == 0:
            dist.send(torch.ones(sent), 1)
        elif RANK == 1:
            with pytest.raises(dist.DistBackendError, match=f"recv of {4 * expected} bytes from rank 0"):
                dist.recv(torch.empty(expected), 0)
    dist.barrier()


def check_wait_timeout_does_not_end_the_collective():
    skip_if_alone()
    tensor = torch.ones(3)
    if RANK == 0:
        work = dist.all_reduce(tensor, async_op=True)
        begun = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"has not ended within 0.2 s"):
            work.wait(timedelta(seconds=0.2))
        assert 0.2 <= time.monotonic() - begun < 50
        assert not work.is_completed()
        store().set("waited", "yes")
        work.wait()
    else:
        store().wait(["waited"])
        dist.all_reduce(tensor)
    assert (tensor == SIZE).all()


def check_group_timeout_names_missing_ranks():
    skip_if_alone()
    group = dist.new_group(timeout=timedelta(seconds=1))
    if RANK == 0:
        with pytest.raises(dist.DistBackendError, match="DeadlineError") as raised:
            dist.all_reduce(torch.ones(3), group=group)
        assert "1" in str(raised.value)
        if SIZE > 1:
            with pytest.raises(dist.DistBackendError, match="recv of 4 bytes from rank 1, tag 0, on rank 0 has not"):
                dist.recv(torch.ones(1), group=group, group_src=1)
    dist.barrier()


def check_monitored_barrier():
    keras_ddl.torch.monitored_barrier()
    keras_ddl.torch.monitored_barrier(timeout=timedelta(seconds=30))
    skip_if_alone()
    if RANK == SIZE - 1:
        store().wait([f"rank {rank} has seen it" for rank in range(SIZE - 1)])
        keras_ddl.torch.monitored_barrier()
    else:
        with pytest.raises(dist.DistBackendError, match=rf"Missing: rank\(s\) {SIZE - 1} of {SIZE}"):
            keras_ddl.torch.monitored_barrier(timeout=timedelta(seconds=0.5))
        store().set(f"rank {RANK} has seen it", "yes")
    dist.barrier()


def check_shutdown_with_running_work():
    skip_if_alone()
    group = dist.new_group()
    if RANK == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        future = work.get_future()
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="NotInitializedError.* shut down"):
            work.wait()
        with pytest.raises(RuntimeError, match="NotInitializedError.* shut down"):
            future.wait()
        with pytest.raises(RuntimeError, match="NotInitializedError.* shut down"):
            work.get_future().wait()
    dist.barrier()


def store():
    return dist.distributed_c10d._get_default_store()


def check_init_again_after_destroy():
    """Must be the last check, because it destroys the group that the others use."""
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    for _ in range(3):
        dist.init_process_group("ddl", timeout=timedelta(seconds=60))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == SIZE
        keras_ddl.torch.monitored_barrier()
        dist.destroy_process_group()
