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


@pytest.mark.parametrize(("model", "killed"), [("lstm", "3:7"), ("mlp", "1:4 3:9"), ("mlp", "2:5 3:5")])
def test_fit_across_hosts(model: str, killed: str, tmp_path: Path) -> None:
    """One rank, one of each host in turn, and both of a host."""
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    options = ("--hosts", "h0:2,h1:2")
    check(tmp_path, model, "arrays", "step", *killed.split(), ranks=4, options=options, KERAS_DDL_SSH=str(agent))
