"""The plan that groups gradients into buckets."""

import itertools
import random

from keras_ddl.bucket import plan_buckets


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
            assert sum(sizes[i] for i in bucket) <= 100 or len(bucket) == 1


def test_plan_buckets_follows_backward():
    assert plan([30, 30, 30, 30, 5, 5]) == [[5, 4], [3, 2, 1], [0]]
    draw = random.Random(1)
    sizes = [draw.randrange(60) for _ in range(40)]
    buckets = plan(sizes, [draw.choice(["float32", "float16"]) for _ in sizes])
    complete = [min(bucket) for bucket in buckets]
    assert complete == sorted(complete, reverse=True)


def test_plan_buckets_starts_small():
    assert plan([10] * 5) == [[4], [3, 2, 1, 0]]
    assert plan([10] * 5, first_bucket_bytes=1000) == [[4, 3, 2, 1, 0]], "never above the bound of the others"
    assert plan([50, 50, 10, 50, 10], ["a", "b", "a", "b", "a"]) == [[4], [3], [1], [2, 0]]


def test_plan_buckets_of_nothing_and_of_one_huge_tensor():
    assert plan([]) == []
    assert plan([10**12]) == [[0]]
    assert plan([10**12, 0, 10**12]) == [[2], [1], [0]]


def test_plan_buckets_reads_the_configuration(monkeypatch):
    monkeypatch.setenv("KERAS_DDL_BUCKET_BYTES", "20")
    monkeypatch.setenv("KERAS_DDL_FIRST_BUCKET_BYTES", "5")
    assert plan_buckets([10, 10, 10], ["float32"] * 3) == [[2], [1, 0]]
