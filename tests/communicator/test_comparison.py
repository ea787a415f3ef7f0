"""Which rank a comparison between ranks names."""

import pytest

from keras_ddl.communicator import comparison


@pytest.mark.parametrize(
    ("values", "other"),
    [([7], None), ([7, 7, 7], None), ([7, 7, 8], 2), ([7, 8, 7], 1), ([7, 8, 8], 1), ([None, 7], 1)],
)
def test_first_rank_that_differs_from_rank_0_is_named(values, other):
    assert comparison.other_rank(values) == other
