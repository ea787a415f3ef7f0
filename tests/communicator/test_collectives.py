"""Collectives on arrays, through shared memory and MPI; tests/ops tests collectives on tensors.

communicator: every collective against NumPy (any order, any thread, any count: test_fuzz.py). split: communicators
of some ranks. hierarchy: the rings of a forced mode, whose outer dimensions use MPI even inside a host.
"""

import os
from pathlib import Path

import pytest

from harness.rank_tests import rank_tests, run_ranks

HERE = Path(__file__).parent


def checks(*names: str) -> list[Path]:
    return [HERE / f"{name}_checks.py" for name in names]


# Two launches: ranks of one host, started as by `keras-ddl run`; and both layers of a box, started by mpirun.
test_of_two = rank_tests(checks("communicator", "split"), [2], mpi=False)
test_of_four = rank_tests(checks("communicator", "split", "hierarchy"), [(4, "x:2x2")])
test_alone = pytest.mark.long(rank_tests(checks("communicator", "split"), [1]))
test_of_more_in_boxes = pytest.mark.long(
    rank_tests(checks("communicator", "split", "hierarchy"), [(3, "x:1x3"), (4, "x:1x2x2"), (8, "x:2x4")])
)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parallel
def test_all_reduce_of_more_than_2_to_the_31_elements_in_place():
    count = 2**31 + 7
    needed = 2 * count + (1 << 30)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free memory for 2 ranks; {available >> 30} GiB are free")

    def work(count):
        import numpy as np

        import keras_ddl
        from keras_ddl import communicator

        keras_ddl.init()
        array = np.full(count, keras_ddl.rank() + 1, np.int8)
        array[-1] = 100 * keras_ddl.rank()
        communicator.all_reduce_array(array, out=array)
        return array.shape[0], int(array[:-1].min()), int(array[:-1].max()), int(array[-1])

    outcome = run_ranks(work, 2, args=(count,)).check()
    assert [rank.result for rank in outcome.ranks] == [(count, 3, 3, 100)] * 2


@pytest.mark.long
@pytest.mark.parallel
@pytest.mark.parametrize("mode", ["p", "x:2x2"])
def test_results_are_bitwise_equal_from_run_to_run(mode):
    def work():
        import hashlib

        import ml_dtypes
        import numpy as np

        import keras_ddl
        from keras_ddl import communicator

        keras_ddl.init()
        digest = hashlib.sha256()
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            for count in (1, 7, 1000, 300_007):
                array = np.random.default_rng([keras_ddl.rank(), count]).standard_normal(count).astype(dtype)
                for op in ("sum", "mean", "product"):
                    digest.update(communicator.all_reduce_array(array, op).tobytes())
        return digest.hexdigest()

    digests = {rank.result for _ in range(2) for rank in run_ranks(work, 4, mode=mode).check().ranks}
    assert len(digests) == 1, digests
