"""Compares the cost model with textbook formulas."""

import pytest

from keras_ddl.cost_model import Cluster, Dimension, ring

MB = 1e6
FAST, NETWORK = 10e9, 1e9


def test_ring_matches_the_textbook_on_equal_links() -> None:
    one = Cluster((Dimension(1, FAST), Dimension(8, NETWORK, 1e-5)), reduction=2e9)
    # 14 steps of 10 us and of 1 MB at 1 GB/s, 7 additions of 1 MB at 2 GB/s.
    assert ring(one, 8 * MB) == pytest.approx(14 * (10e-6 + 1e-3) + 7 * 0.5e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8, 1000])
def test_ring_bandwidth_term_is_the_lower_bound(ranks: int) -> None:
    assert ring(Cluster((Dimension(ranks, 1e9),)), 100 * MB) == pytest.approx(2 * (ranks - 1) / ranks * 0.1)
