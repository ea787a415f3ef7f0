"""keras-ddl run --restarts: how and where a job is restarted. test_supervisor.py tests whether it is."""

from pathlib import Path

import pytest

from keras_ddl.errors import ConfigError, LaunchError
from keras_ddl.launch.hosts import Host, parse_hosts
from keras_ddl.launch.hosts.placement import Discovery, Placement, host_of_rank
from launch.launching import run_program, write_script

KILLED = """
import signal
N, JOB_DIR = int(os.environ["KERAS_DDL_RESTART"]), Path(os.environ["KERAS_DDL_JOB_DIR"])
print(f"attempt {N}:", *sorted(path.name for path in JOB_DIR.glob("*-0")), flush=True)
(JOB_DIR / f"seen-{N}-{RANK}").touch()
if N == 0:
    while not (JOB_DIR / f"seen-{N}-{1 - RANK}").exists(): time.sleep(0.02)
    if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


@pytest.mark.parallel
@pytest.mark.quiet
def test_next_attempt_has_new_ranks_and_the_same_job_directory(tmp_path: Path):
    ended = run_program(tmp_path, KILLED, "--restarts", "2")
    assert ended.status == 0, ended
    # The job directory survives an attempt; `run` checks that it is removed at the end.
    assert [line for line in ended.out.splitlines() if line[0] != "["] == ["attempt 0:", "attempt 1: seen-0-0"], ended
    assert "keras-ddl: restart 1 of 2, with 2 ranks (rank 1: killed by SIGKILL)\n" in ended.err, ended


def test_placement_leaves_out_lost_hosts_while_enough_ranks_remain():
    hosts = parse_hosts("h0:2,h1:2,h2:2")
    placement = Placement(6, hosts, min_ranks=3)
    assert placement.first(hosts) == (6, hosts)
    placement.lost.add("h1")
    assert placement.later(hosts) == (4, (hosts[0], hosts[2]))
    placement.lost.add("h2")  # two ranks would be too few, so all hosts are tried again
    assert placement.later(hosts) == (6, hosts)
    unbounded = Placement(6, hosts)
    assert unbounded.first(hosts) == (6, hosts)
    unbounded.lost.add("h1")
    assert unbounded.later(hosts) == (6, hosts)


def test_placement_follows_a_script_between_its_bounds():
    placement = Placement(4, (), Discovery("hosts"), min_ranks=2, max_ranks=6)
    assert placement.first(parse_hosts("h0:3")) is None
    assert placement.first(parse_hosts("h0:3,h1:2")) == (5, parse_hosts("h0:3,h1:2"))
    assert placement.later(()) is None
    assert placement.later(parse_hosts("h0:1")) is None
    assert placement.later(parse_hosts("h0:2")) == (2, parse_hosts("h0:2"))
    assert placement.later(parse_hosts("h0:8")) == (6, parse_hosts("h0:8"))
    placement.lost.add("h1")
    assert placement.later(parse_hosts("h0:2,h1:2")) == (2, parse_hosts("h0:2"))
    placement.later(parse_hosts("h0:2"))  # as the script reports
    assert placement.later(parse_hosts("h0:2,h1:2")) == (4, parse_hosts("h0:2,h1:2"))
    # Without bounds the number of ranks is fixed.
    constant = Placement(2, (), Discovery("hosts"))
    assert constant.first(parse_hosts("h0:4")) == (2, parse_hosts("h0:4"))
    assert constant.later(parse_hosts("h0:1")) is None
    everything = Placement(None, (), Discovery("hosts"))
    assert everything.first(parse_hosts("h0:4,h1:1")) == (5, parse_hosts("h0:4,h1:1"))


def test_placement_refuses_contradictions():
    with pytest.raises(ConfigError, match="either listed or discovered.*Received: "):
        Placement(2, (Host("h0", 2),), Discovery("hosts"))


def test_host_of_rank_counts_slots():
    hosts = parse_hosts("h0:2,h1:1")
    assert [host_of_rank(hosts, rank) for rank in range(4)] == ["h0", "h0", "h1", None]


def test_placement_knows_which_changes_of_hosts_matter():
    placement = Placement(2, (), Discovery("hosts"), min_ranks=1, max_ranks=3)
    ranks, hosts = placement.first(parse_hosts("h0:1,h1:1"))
    placement.lost.add("h3")
    for text, changes in (
        ("h0:1,h1:1", False),
        ("h1:1,h0:1", False),
        ("h1:1,h0:1,h3:1", False),  # h3 is lost
        ("h0:1,h1:2", True),
        ("h0:1", True),
        ("h0:1,h1:1,h2:1", True),
    ):
        assert placement.would_change(ranks, hosts, parse_hosts(text)) is changes, text
    assert placement.would_change(ranks, hosts, ())
    assert placement.lost == {"h3"} and placement.order == ["h0", "h1"]
    assert placement.later(parse_hosts("h1:1,h0:1")) == (2, hosts)


def test_discovery_reads_a_scripts_output(tmp_path: Path):
    def script(text: str) -> Discovery:
        return Discovery(f"{write_script(tmp_path / 'hosts', text)} argument", slots=4)

    assert script("echo h0:2; echo; echo h1").hosts() == (Host("h0", 2), Host("h1", 4))
    assert script("echo $1:1").hosts() == (Host("argument", 1),)
    assert script("sleep 60").hosts(stopped=lambda: True) == ()
    for text, what in (("echo oops >&2; exit 3", "status 3.*oops"), ("echo h0:x", "h0:x")):
        with pytest.raises(LaunchError, match=f"host discovery script must be .*{what}"):
            script(text).hosts()
    (tmp_path / "hosts").chmod(0o644)
    with pytest.raises(LaunchError, match="cannot be run"):
        Discovery(str(tmp_path / "hosts")).hosts()
