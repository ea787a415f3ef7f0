"""fit goes on when ranks of several hosts are killed, and ends with the weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.test_run_hosts import AGENT, can_make_hosts
from strategy.test_survival import check

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.quiet,
    pytest.mark.long,
    pytest.mark.skipif(not can_make_hosts(), reason="namespaces need root"),
]


def across_hosts(tmp_path: Path, hosts: str, model: str, where: str, killed: str) -> None:
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    options = ("--hosts", hosts)
    ranks = sum(int(each.partition(":")[2]) for each in hosts.split(","))
    check(tmp_path, model, "arrays", where, *killed.split(), ranks=ranks, options=options, KERAS_DDL_SSH=str(agent))


@pytest.mark.parametrize(("model", "killed"), [("lstm", "3:7"), ("mlp", "1:4 3:9"), ("mlp", "2:5 3:5")])
def test_fit_across_hosts(model: str, killed: str, tmp_path: Path) -> None:
    """One rank, one of each host in turn, and both of a host."""
    across_hosts(tmp_path, "h0:2,h1:2", model, "step", killed)


@pytest.mark.parametrize(
    ("hosts", "killed"), [("h0:2,h1:2", "2:5 3:5"), ("h0:2,h1:2", "0:5 1:5"), ("h0:2,h1:1,h2:2", "0:5 1:5 2:11")]
)
def test_shards_of_a_lost_host_are_on_another(hosts: str, killed: str, tmp_path: Path) -> None:
    """All ranks of a host are lost at once, between two steps; in the last case another host later."""
    across_hosts(tmp_path, hosts, "shards", "between", killed)
