"""fit goes on when ranks of several hosts are killed, and when hosts come and go, and ends with the weights of one
process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_survival import PROGRAM, check, check_ended

from launch.launching import Started
from launch.test_run_hosts import can_make_hosts, write_agent

EPOCHS = 60

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.quiet,
    pytest.mark.long,
    pytest.mark.skipif(not can_make_hosts(), reason="namespaces need root"),
]


@pytest.fixture
def agent(tmp_path: Path) -> str:
    return write_agent(tmp_path)


def across_hosts(tmp_path: Path, agent: str, hosts: str, model: str, where: str, killed: str) -> None:
    options = ("--hosts", hosts)
    ranks = sum(int(each.partition(":")[2]) for each in hosts.split(","))
    check(tmp_path, model, "arrays", where, *killed.split(), ranks=ranks, options=options, KERAS_DDL_SSH=agent)


@pytest.mark.parametrize(
    ("model", "hosts", "killed"),
    [
        ("shards", "h0:2,h1:2", "2:5 3:5"),
        ("shards", "h0:2,h1:2", "0:5 1:5"),
        ("shards", "h0:2,h1:1,h2:2", "0:5 1:5 2:11"),
        ("weights+tables", "h0:2,h1:2", "2:5 3:5"),
        ("weights+tables", "h0:1,h1:2", ""),
    ],
)
def test_shards_of_a_lost_host_are_on_another(model: str, hosts: str, killed: str, agent: str, tmp_path: Path) -> None:
    """All ranks of a host are lost at once, between two steps; in one case another host later, in one none."""
    across_hosts(tmp_path, agent, hosts, model, "between", killed)


class Changing:
    """A training on the hosts of a file, which a test changes while it runs slowly."""

    def __init__(self, tmp_path: Path, agent: str, hosts: str, *killed: str, model: str = "mlp") -> None:
        self.folder, self.hostfile, self.lines = tmp_path, tmp_path / "hosts", ""
        self.model = model
        self.write(hosts)
        env = {"KERAS_DDL_SSH": agent, "EPOCHS": str(EPOCHS), "UNTIL": str(tmp_path / "until")}
        command = ["run", "--hostfile", "hosts", "-np", "1:", "python", PROGRAM, model, "arrays", *killed]
        self.started = Started(command, tmp_path, env=env)

    def write(self, hosts: str) -> None:
        self.hostfile.write_text(hosts.replace(",", "\n").replace(":", " slots=") + "\n")

    def see(self, *texts: str) -> None:
        """Waits until the launcher has said all of them."""
        stderr = self.started.process.stderr
        assert stderr is not None
        while not all(text in self.lines for text in texts):
            line = stderr.readline().decode()
            assert line, f"{texts}\n{self.lines}\n{self.started.finish()}"
            self.lines += line

    def finish(self, left: list[int]) -> str:
        """Lets the training end; checks it, and returns what the launcher has said."""
        (self.folder / "until").touch()
        ended = self.started.finish()
        assert ended.status == 0, f"{self.lines}\n{ended}"
        check_ended(ended, left, PROGRAM, self.model, "arrays", EPOCHS)
        return self.lines + ended.err


@pytest.mark.parametrize("model", ["mlp", "shards", "weights+tables"])
def test_hosts_that_the_file_names_later_join_and_others_leave(model: str, agent: str, tmp_path: Path) -> None:
    job = Changing(tmp_path, agent, "h0:2", model=model)
    job.started.wait_for(tmp_path / "until-0")
    job.write("h0:2,h1:2")
    job.see("ranks 2 to 3 started on host h1 and will join the others.", "has joined; 4 ranks continue.")
    job.write("h1:2")
    job.see(
        "rank 0 leaves (no room for it in hosts); 2 ranks continue.",
        "rank 1 leaves (no room for it in hosts); 2 ranks continue.",
    )
    job.write("h1:1,h2:1")
    job.see("rank 3 leaves (no room for it in hosts); 1 rank continues.", "rank 4 has joined; 2 ranks continue.")
    said = job.finish([2, 4])
    assert "Traceback" not in said and "lost" not in said, said
