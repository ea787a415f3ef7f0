"""The checksum of weights: every bit counts, whatever the dtype and size."""

import ml_dtypes
import numpy as np
import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.state.checksum import checksum
from keras_ddl.strategy.agreement import compared


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.bool_])
@pytest.mark.parametrize("count", [1, 7, 4096, 5003])
def test_checksum_changes_with_every_bit(dtype, count):
    array = np.random.default_rng(0).integers(0, 2, count).astype(dtype)
    before = checksum(array)
    for place in {0, count // 2, count - 1}:
        for bit in range(8 * array.itemsize):
            flipped = array.copy()
            flipped.view(np.uint8)[place * array.itemsize + bit // 8] ^= 1 << bit % 8
            assert checksum(flipped) != before


def test_checksum_reads_scalars_empty_and_strided_arrays():
    assert checksum(np.float32(3)) == checksum(np.full((1, 1), 3, np.float32)) != checksum(np.float32(4))
    assert checksum(np.zeros((0, 3))) == 0
    matrix = np.arange(12.0).reshape(3, 4)
    assert checksum(matrix.T) == checksum(matrix.T.copy()) != checksum(matrix)


def test_digests_differ_if_checksums_include_their_own_digest():
    def digest(sums: list[int]) -> int:
        return compared.digest_of_numbers([*sums, compared.digest_of_numbers(sums)])

    assert digest([2265836802, 3590021103]) != digest([2222644569, 2821553702])


def test_drift_check_reads_scalars_of_bfloat16():
    learning_rate = tf.Variable(tf.constant(0.5, tf.bfloat16))
    assert checksum(compared.values(learning_rate)) == checksum(learning_rate.numpy())
