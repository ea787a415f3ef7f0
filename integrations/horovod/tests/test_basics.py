"""Horovod's ranks and sizes on several hosts, computed without real hosts."""

from __future__ import annotations

import pytest

from keras_ddl import communicator
from keras_ddl.horovod import basics
from keras_ddl.topology import Topology


@pytest.mark.parametrize(
    ("hosts", "expected", "homogeneous"),
    [
        ((0, 0, 1, 1), [(0, 2), (0, 2), (1, 2), (1, 2)], True),
        # Only host 1 has a third rank.
        ((0, 0, 1, 1, 1, 2), [(0, 3), (0, 2), (1, 3), (1, 2), (0, 1), (2, 3)], False),
        ((0,), [(0, 1)], True),
    ],
)
def test_cross_rank_and_size_count_hosts_with_this_local_rank(
    hosts: tuple[int, ...], expected: list[tuple[int, int]], homogeneous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rank in range(len(hosts)):
        place = Topology(rank, len(hosts), hosts, tuple(hosts.index(host) for host in hosts), "p", ())
        monkeypatch.setattr(communicator, "topology", lambda place=place: place)
        found.append((basics.cross_rank(), basics.cross_size()))
        assert basics.is_homogeneous() == homogeneous
    assert found == expected
