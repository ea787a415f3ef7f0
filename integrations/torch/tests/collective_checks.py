"""Compares every collective of backend "ddl" with results that one process computes."""

import itertools
import warnings

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import keras_ddl.torch  # noqa: F401  (registers the backend)
from harness.rank_program import skip

warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 deprecates some names
dist.init_process_group("ddl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
REDUCED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
)
MOVED = (*REDUCED, torch.int16, torch.bool, torch.complex64)
SIZES = (0, 1, 7, 1000, 300_007)
OPS = {
    ReduceOp.SUM: lambda all_of: all_of.sum(0),
    ReduceOp.MIN: lambda all_of: all_of.amin(0),
    ReduceOp.MAX: lambda all_of: all_of.amax(0),
    ReduceOp.PRODUCT: lambda all_of: all_of.prod(0),
}


def values(rank, size, dtype=torch.float32):
    """Returns small whole numbers that differ by rank and position: sums and products are exact in every dtype."""
    return ((torch.arange(size) * 7 + 3 * rank) % 3 + (rank % 2)).to(dtype)


def all_values(size, dtype=torch.float32):
    return torch.stack([values(rank, size, dtype) for rank in range(SIZE)])


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def wait_for(work):
    """Waits for a collective; None: it has already ended."""
    if work is not None:
        work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None


def check_no_tensorflow_is_imported():
    import sys

    assert not {"tensorflow", "keras"} & set(sys.modules)


def check_all_reduce_of_every_dtype_op_and_size():
    for dtype, (op, expected), size in itertools.product(REDUCED, OPS.items(), SIZES):
        if size > 1000 and dtype not in (torch.bfloat16, torch.float32, torch.uint8):
            continue
        for later in (False, True):
            tensor = values(RANK, size, dtype)
            wait_for(dist.all_reduce(tensor, op, async_op=later))
            if size:
                assert_same(tensor, expected(all_values(size, dtype)).to(dtype))


def check_all_reduce_mean():
    for dtype in (torch.float32, torch.float64):
        tensor = values(RANK, 1001, dtype)
        dist.all_reduce(tensor, ReduceOp.AVG)
        torch.testing.assert_close(tensor, all_values(1001, dtype).mean(0))


def check_all_reduce_of_bools_is_any_and_all():
    mine = torch.tensor([RANK == 0, True, False])
    for op, expected in ((ReduceOp.SUM, [True, True, False]), (ReduceOp.PRODUCT, [SIZE == 1, True, False])):
        tensor = mine.clone()
        dist.all_reduce(tensor, op)
        assert_same(tensor, torch.tensor(expected))
        assert tensor.view(torch.uint8).max() <= 1  # a sum would wrap to 0 at 256 ranks


def check_all_reduce_of_permuted_tensors():
    # Dense, but not in index order, like gradients of channels_last models.
    tensor = values(RANK, 24).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    assert_same(tensor.contiguous(), all_values(24).sum(0).reshape(2, 3, 2, 2))


def check_all_reduce_does_not_touch_adjacent_memory():
    whole = torch.full((30,), -1.0)
    whole[10:20] = values(RANK, 10)
    dist.all_reduce(whole[10:20])
    assert_same(whole[10:20], all_values(10).sum(0))
    assert (whole[:10] == -1).all() and (whole[20:] == -1).all()


def check_all_reduce_coalesced():
    tensors = [values(RANK, 5), values(RANK, 70_001), values(RANK, 0)]
    with warnings.catch_warnings(action="ignore"):
        dist.all_reduce_coalesced(tensors)
        for tensor in tensors:
            assert_same(tensor, all_values(tensor.numel(), tensor.dtype).sum(0))
        dist.all_reduce_coalesced(tensors, async_op=True).wait()
    assert_same(tensors[1], SIZE * all_values(70_001).sum(0))


def check_reduce():
    for root in range(SIZE):
        tensor = values(RANK, 1000)
        dist.reduce(tensor, root)
        if root == RANK:
            assert_same(tensor, all_values(1000).sum(0))


def check_reduce_scatter_into_one_tensor():
    for dtype, (op, expected), rows in itertools.product((torch.float32, torch.int64), OPS.items(), (0, 1, 5001)):
        mine = values(RANK, rows * SIZE * 3, dtype).reshape(rows * SIZE, 3)
        for later in (False, True):
            output = torch.empty(rows, 3, dtype=dtype)
            wait_for(dist.reduce_scatter_tensor(output, mine, op, async_op=later))
            if rows:
                assert_same(output, expected(all_values(rows * SIZE * 3, dtype)).reshape(SIZE, rows, 3)[RANK].to(dtype))
        assert_same(mine, values(RANK, rows * SIZE * 3, dtype).reshape(rows * SIZE, 3))  # unchanged


def check_reduce_scatter_of_a_list():
    for lengths in ([4] * SIZE, list(range(SIZE))):
        pieces = [values(RANK + rank, length) for rank, length in enumerate(lengths)]
        output = torch.empty(lengths[RANK])
        dist.reduce_scatter(output, pieces)
        assert_same(output, torch.stack([values(rank + RANK, lengths[RANK]) for rank in range(SIZE)]).sum(0))


def check_broadcast_of_every_dtype():
    for dtype, root, size in itertools.product(MOVED, range(SIZE), SIZES):
        for later in (False, True):
            tensor = values(RANK, size, dtype)
            wait_for(dist.broadcast(tensor, root, async_op=later))
            assert_same(tensor, values(root, size, dtype))


def check_all_gather_into_one_tensor():
    for dtype, size in itertools.product(MOVED, SIZES):
        for later in (False, True):
            output = torch.empty(SIZE * size, dtype=dtype)
            wait_for(dist.all_gather_into_tensor(output, values(RANK, size, dtype), async_op=later))
            assert_same(output, all_values(size, dtype).reshape(-1))


def check_all_gather_into_a_list():
    for dtype in MOVED:
        outputs = [torch.empty(2, 3, dtype=dtype) for _ in range(SIZE)]
        dist.all_gather(outputs, values(RANK, 6, dtype).reshape(2, 3))
        assert_same(torch.stack(outputs), all_values(6, dtype).reshape(SIZE, 2, 3))


def check_all_gather_of_transposed_tensors():
    outputs = [torch.empty(3, 2).T if rank % 2 else torch.empty(2, 3) for rank in range(SIZE)]
    dist.all_gather(outputs, values(RANK, 6).reshape(3, 2).T)
    assert_same(torch.stack(outputs), all_values(6).reshape(SIZE, 3, 2).transpose(1, 2))


def check_all_gather_of_different_lengths():
    outputs = [torch.empty(3 * rank) for rank in range(SIZE)]
    dist.all_gather(outputs, values(RANK, 3 * RANK))
    for rank in range(SIZE):
        assert_same(outputs[rank], values(rank, 3 * rank))


def check_all_gather_is_done_when_it_says_so():
    outputs = [torch.full((1000,), -1.0) for _ in range(SIZE)]
    work = dist.all_gather(outputs, values(RANK, 1000), async_op=True)
    while not work.is_completed():
        pass
    assert_same(torch.stack(outputs), all_values(1000))


def check_gather_and_scatter():
    for dtype, root in itertools.product(MOVED, range(SIZE)):
        here = root == RANK
        outputs = [torch.empty(2, 2, dtype=dtype) for _ in range(SIZE)] if here else None
        dist.gather(values(RANK, 4, dtype).reshape(2, 2), outputs, root)
        if here:
            assert_same(torch.stack(outputs), all_values(4, dtype).reshape(SIZE, 2, 2))
        output = torch.empty(5, dtype=dtype)
        dist.scatter(output, list(all_values(5, dtype)) if here else None, root)
        assert_same(output, values(RANK, 5, dtype))


def check_all_to_all_with_equal_splits():
    for dtype in MOVED:
        output = torch.empty(2 * SIZE, 3, dtype=dtype)
        dist.all_to_all_single(output, values(RANK, 6 * SIZE, dtype).reshape(2 * SIZE, 3))
        assert_same(output, all_values(6 * SIZE, dtype).reshape(SIZE, SIZE, 2, 3)[:, RANK].reshape(2 * SIZE, 3))


def check_all_to_all_with_unequal_splits():
    # Rank s sends r + s rows of two elements to rank r.
    def sent(sender, to):
        return values(10 * sender + to, 2 * (sender + to)).reshape(-1, 2)

    mine = [sent(RANK, to) for to in range(SIZE)]
    expected = [sent(sender, RANK) for sender in range(SIZE)]
    output = torch.empty(sum(map(len, expected)), 2)
    work = dist.all_to_all_single(output, torch.cat(mine), [*map(len, expected)], [*map(len, mine)], async_op=True)
    work.wait()
    assert_same(output, torch.cat(expected))
    outputs = [torch.empty_like(each) for each in expected]
    dist.all_to_all(outputs, mine)
    assert_same(torch.cat(outputs), torch.cat(expected))


def check_send_and_receive_around_a_ring():
    if SIZE == 1:
        skip("one rank has nobody to send to")
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for size, dtype in ((0, torch.float32), (1, torch.complex64), (1000, torch.bool), (1_000_003, torch.float32)):
        mine, theirs = values(RANK, size, dtype), torch.empty(size, dtype=dtype)
        pairs = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        assert_same(theirs, values(before, size, dtype))


def check_receive_by_tag_and_from_any_rank():
    if SIZE == 1:
        skip("one rank has nobody to send to")
    if RANK == 0:
        dist.send(values(1, 3), 1, tag=1)
        dist.send(values(2, 3), 1, tag=2)
    if RANK == 1:
        first, second = torch.empty(3), torch.empty(3)
        assert dist.recv(second, 0, tag=2) == 0
        assert dist.recv(first, tag=1) == 0
        assert_same(first, values(1, 3))
        assert_same(second, values(2, 3))


def check_futures_complete_in_the_order_of_the_collectives():
    tensors = [torch.full((size,), RANK + 1.0) for size in (1 << 20, 1, 1000, 0, 1 << 18)]
    order = []
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [
        work.get_future().then(lambda done, i=i: order.append(i) or done.value()) for i, work in enumerate(works)
    ]
    for tensor, value in zip(tensors, torch.futures.wait_all(futures)):
        assert value[0] is tensor or value[0].data_ptr() == tensor.data_ptr()
        assert (tensor == sum(range(1, SIZE + 1))).all()
    assert sorted(order) == list(range(len(tensors)))


def check_works_may_be_dropped():
    # The tensor must live until the collective is done.
    for _ in range(20):
        dist.all_reduce(torch.full((300_000,), 1.0), async_op=True)
    dist.barrier()
    output = [torch.empty(100_000) for _ in range(SIZE)]
    dist.all_gather(output, values(RANK, 100_000), async_op=True)
    dist.barrier()


def check_group_of_some_ranks():
    members = list(range(0, SIZE, 2))
    group = dist.new_group(members)
    if RANK in members:
        assert dist.get_group_rank(group, RANK) == members.index(RANK)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert_same(tensor, torch.full((3,), float(len(members))))
        tensor = torch.full((2,), float(RANK))
        dist.broadcast(tensor, members[-1], group=group)
        assert_same(tensor, torch.full((2,), float(members[-1])))
    dist.barrier()
