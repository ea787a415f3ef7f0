"""The plan that groups gradients into buckets."""

import itertools
import random

from keras_ddl.gradients import bucket_size
from keras_ddl.gradients.bucket_size import BucketSize
from keras_ddl.gradients.buckets import plan_buckets


def plan(sizes, dtypes=None, **bounds):
    return plan_buckets(
        sizes, dtypes or ["float32"] * len(sizes), **{"bucket_bytes": 100, "first_bucket_bytes": 10, **bounds}
    )


def test_plan_buckets_holds_every_tensor_once():
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.choice([0, 1, 5, 40, 99, 100, 101, 5000]) for _ in range(draw.randrange(30))]
        dtypes = [draw.choice(["float32", "float16"]) for _ in sizes]
        buckets = plan(sizes, dtypes)
        assert sorted(itertools.chain(*buckets)) == list(range(len(sizes)))
        for bucket in buckets:
            assert len({dtypes[i] for i in bucket}) == 1
            before_the_last = sum(sizes[i] for i in bucket[:-1])
            assert before_the_last + sizes[bucket[-1]] <= 100 or before_the_last < 25


def test_plan_buckets_follows_backward():
    assert plan([30, 30, 30, 30, 5, 5]) == [[5, 4], [3, 2, 1], [0]]
    draw = random.Random(1)
    sizes = [draw.randrange(60) for _ in range(40)]
    buckets = plan(sizes, [draw.choice(["float32", "float16"]) for _ in sizes])
    complete = [min(bucket) for bucket in buckets]
    assert complete == sorted(complete, reverse=True)


def test_plan_buckets_starts_small():
    assert plan([10] * 5) == [[4], [3, 2, 1, 0]]
    assert plan([10] * 5, first_bucket_bytes=1000) == [[4, 3, 2, 1, 0]], "never above the bound of later buckets"
    assert plan([50, 50, 10, 50, 10], ["a", "b", "a", "b", "a"]) == [[4], [3], [1], [2, 0]]


def test_plan_buckets_with_no_tensor_or_one_huge_tensor():
    assert plan([]) == []
    assert plan([10**12]) == [[0]]
    assert plan([10**12, 0, 10**12]) == [[2], [1, 0]]


def test_plan_buckets_sends_small_tensors_with_their_large_neighbours():
    assert plan([99, 2, 99, 2, 99, 2]) == [[5, 4], [3, 2], [1, 0]]
    assert plan([90, 30, 90, 30], first_bucket_bytes=100) == [[3], [2], [1], [0]]


def test_plan_buckets_reads_the_configuration(monkeypatch):
    monkeypatch.setenv("KERAS_DDL_FIRST_BUCKET_BYTES", "5")
    assert plan_buckets([10, 10, 10], ["float32"] * 3, bucket_bytes=20) == [[2], [1, 0]]


def test_bucket_size_is_the_smallest_that_uses_the_links():
    def seconds(latency, bandwidth):
        return {size: latency + size / bandwidth for size in bucket_size.SIZES}

    assert bucket_size.choose(seconds(0.0, 6e9)) == 1 << 20
    assert bucket_size.choose(seconds(50e-6, 6e9)) == 4 << 20
    assert bucket_size.choose(seconds(1e-3, 6e9)) == 32 << 20
    assert bucket_size.choose({1 << 20: 0.2}) == 1 << 20, "on a slow link only one size is measured"
    # Sizes that fit the caches are faster; their bandwidth does not count for the others.
    assert bucket_size.choose({1: 1.0, 2: 1.1, 4: 2.1, 8: 8.0}) == 2


def test_bucket_size_leaves_a_few_buckets_unless_it_is_fixed():
    mib = 1 << 20
    measured = BucketSize(16 * mib, measured=True)
    assert [measured.bound(n * mib) for n in (0, 2, 40, 400)] == [mib, mib, 10 * mib, 16 * mib]
    assert BucketSize(16 * mib, measured=False).bound(2 * mib) == 16 * mib
