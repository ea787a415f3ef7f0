"""keras-ddl run --restarts: jobs that are started again, and those that are not."""

import signal
from pathlib import Path

import pytest

from harness.event_lines import read_events
from harness.needed_parts import needs_part
from keras_ddl.errors import ConfigError, LaunchError
from keras_ddl.launch.mpirun import Host, parse_hosts
from keras_ddl.launch.placement import Discovery, Placement, host_of_rank
from launch.launching import Started, eventually, processes, run, write_program

ranks = [pytest.mark.parallel, pytest.mark.quiet]

ATTEMPT = 'N = int(os.environ["KERAS_DDL_RESTART"])\nJOB_DIR = Path(os.environ["KERAS_DDL_JOB_DIR"])\n'
KILLED = f"""
import signal
{ATTEMPT}
print(f"attempt {{N}}:", *sorted(path.name for path in JOB_DIR.glob("*-0")), flush=True)
(JOB_DIR / f"seen-{{N}}-{{RANK}}").touch()
if N < 2:
    while not (JOB_DIR / f"seen-{{N}}-{{1 - RANK}}").exists(): time.sleep(0.02)
    if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


@needs_part("--events")
def test_restarts_go_on_until_an_attempt_succeeds(tmp_path: Path):
    program = write_program(tmp_path, KILLED)
    options = ["--restarts", "2", "--output-dir", "out", "--events", "events.jsonl"]
    ended = run(["run", "-np", "2", *options, "python", program], tmp_path)
    assert ended.status == 0, ended
    shown = [line for line in ended.out.splitlines() if not line.startswith("[1]")]
    # What attempts leave in the directory of the job is there for the next one; `run` looks that it goes at the end.
    assert shown == ["attempt 0:", "attempt 1: seen-0-0", "attempt 2: seen-0-0 seen-1-0"], ended
    for number in (1, 2):
        assert f"keras-ddl: restart {number} of 2, with 2 ranks (rank 1: killed by SIGKILL)\n" in ended.err, ended
    assert ended.err.count("rank 1 on host") == 2, ended
    logs = [path.read_text().partition(":")[0] for path in (tmp_path / "out").glob("**/rank-0.log")]
    assert sorted(logs) == ["attempt 0", "attempt 1", "attempt 2"]
    assert (tmp_path / "out" / "restart-2" / "rank-1.log").exists()
    events = read_events(tmp_path / "events.jsonl")
    assert [each["restart"] for each in events if each["event"] == "start"] == [0, 1, 2]
    restarts = [(each["restart"], each["reason"]) for each in events if each["event"] == "restart"]
    assert restarts == [(1, "rank 1: killed by SIGKILL"), (2, "rank 1: killed by SIGKILL")]
    died = [each for each in events if each["event"] == "rank_end" and each["lost"]]
    assert [(each["rank"], each["signal"]) for each in died] == [(1, "SIGKILL")] * 2
    assert (events[-1]["event"], events[-1]["status"]) == ("end", 0) and len({each["job"] for each in events}) == 1


def test_restarts_end_with_the_status_and_the_traceback_of_the_last_attempt(tmp_path: Path):
    program = write_program(tmp_path, ATTEMPT + "if RANK == 1: raise ValueError(f'of attempt {N}')\ntime.sleep(600)")
    ended = run(["run", "-np", "2", "--restarts", "1", "python", program], tmp_path)
    assert ended.status == 1, ended
    assert ended.err.splitlines()[-1] == "ValueError: of attempt 1", ended
    assert ended.err.count("Traceback") == 2, ended
    assert "not started again: this was restart 1 of 1" in ended.err, ended


@pytest.mark.parametrize(
    ("source", "status", "attempts", "said"),
    [
        ("sys.exit(2)", 2, 1, "exit status 2 means that the command cannot work"),
        pytest.param(
            "raise ValueError('as before')", 1, 2, "rank 0 has failed in the same way twice", marks=pytest.mark.long
        ),
        pytest.param("os.abort()", 128 + signal.SIGABRT, 2, "in the same way twice", marks=pytest.mark.long),
    ],
)
def test_restarts_leave_alone_what_they_cannot_mend(tmp_path: Path, source: str, status: int, attempts: int, said: str):
    program = write_program(tmp_path, "print('begun', flush=True)\n" + source)
    ended = run(["run", "-np", "1", "--restarts", "5", "python", program], tmp_path)
    assert ended.status == status, ended
    assert ended.out.count("begun") == attempts, ended
    assert said in ended.err, ended


@pytest.mark.long
def test_restarts_share_one_timeout(tmp_path: Path):
    program = write_program(tmp_path, ATTEMPT + "time.sleep(1)\nif N < 1: sys.exit(3)\ntime.sleep(600)")
    ended = run(["run", "-np", "2", "--restarts", "5", "--timeout", "15", "python", program], tmp_path)
    assert ended.status == 124, ended
    assert "restart 1 of 5" in ended.err and "restart 2" not in ended.err, ended
    assert "did not end within 15 s" in ended.err, ended


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_restarts_end_with_a_signal_to_the_launcher(tmp_path: Path, signum: signal.Signals):
    # The script that discovers hosts shows none after the first attempt: the signal comes while the launcher waits.
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\nif [ -e failed-0 ]; then echo >> asked; else echo localhost:1; fi\n")
    script.chmod(0o755)
    program = write_program(tmp_path, "here('failed'); sys.exit(3)")
    options = ["--restarts", "5", "--host-discovery-script", str(script)]
    started = Started(["run", "-np", "1", *options, "python", program], tmp_path)
    asked = tmp_path / "asked"
    started.wait_for(asked)
    assert eventually(lambda: asked.stat().st_size >= 2)
    assert started.process.poll() is None
    started.process.send_signal(signum)
    ended = started.finish()
    assert ended.status == 128 + signum, ended
    assert "waiting for hosts with room for 1 rank(s): the available hosts are none." in ended.err, ended
    assert "restart 1" not in ended.err, ended


@pytest.mark.long
def test_restarts_in_the_middle_of_an_attempt_end_with_a_signal(tmp_path: Path):
    program = write_program(tmp_path, ATTEMPT + "here(f'up-{N}')\nif N == 0: sys.exit(3)\ntime.sleep(600)")
    started = Started(["run", "-np", "2", "--restarts", "5", "python", program], tmp_path)
    started.wait_for(tmp_path / "up-1-0", tmp_path / "up-1-1")
    started.process.terminate()
    ended = started.finish()
    assert ended.status == 143 and "restart 2" not in ended.err, ended


@pytest.mark.long
def test_restarts_leave_nothing_when_the_launcher_is_killed(tmp_path: Path):
    program = write_program(tmp_path, ATTEMPT + "(JOB_DIR / 'file').touch(); here('up')\ntime.sleep(600)")
    started = Started(["run", "-np", "2", "--restarts", "5", "python", program], tmp_path)
    started.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    started.process.kill()
    started.process.wait()
    assert eventually(lambda: not processes(started.mark)), processes(started.mark)
    started.process.communicate()
    assert list(started.tmp.glob("keras_ddl-job-*")) == []


def test_restarts_take_hosts_and_number_of_ranks_from_a_script(tmp_path: Path):
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\n[ -e up-0 ] && echo localhost:1 || echo localhost:3\n")
    script.chmod(0o755)
    program = write_program(
        tmp_path,
        """
here("up"); print("of", os.environ["OMPI_COMM_WORLD_SIZE"], flush=True)
if os.environ["KERAS_DDL_RESTART"] == "0": sys.exit(3)
""",
    )
    options = ["--restarts", "3", "--min-np", "1", "--host-discovery-script", str(script)]
    ended = run(["run", "-np", "2", *options, "python", program], tmp_path)
    assert ended.status == 0, ended
    assert sorted(ended.out.splitlines()) == ["[1] of 2", "of 1", "of 2"], ended
    assert "restart 1 of 3, with 1 rank on localhost:1" in ended.err, ended


for test in [value for name, value in list(globals().items()) if name.startswith("test_")]:
    for mark in ranks:
        globals()[test.__name__] = mark(test)


# ---- without ranks -----------------------------------------------------------------------------------------------


def test_placement_leaves_out_lost_hosts_while_enough_ranks_remain():
    hosts = parse_hosts("h0:2,h1:2,h2:2")
    placement = Placement(6, hosts, min_ranks=3)
    assert placement.first(hosts) == (6, hosts)
    placement.lost.add("h1")
    assert placement.later(hosts) == (4, (hosts[0], hosts[2]))
    placement.lost.add("h2")  # two ranks would be too few: all are tried again
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
    placement.later(parse_hosts("h0:2"))  # the script has noticed
    assert placement.later(parse_hosts("h0:2,h1:2")) == (4, parse_hosts("h0:2,h1:2"))
    # Without bounds the number of ranks stays.
    constant = Placement(2, (), Discovery("hosts"))
    assert constant.first(parse_hosts("h0:4")) == (2, parse_hosts("h0:4"))
    assert constant.later(parse_hosts("h0:4")) == (2, parse_hosts("h0:4"))
    assert constant.later(parse_hosts("h0:1")) is None
    everything = Placement(None, (), Discovery("hosts"))
    assert everything.first(parse_hosts("h0:4,h1:1")) == (5, parse_hosts("h0:4,h1:1"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"wanted": 2, "max_ranks": 3},
        {"wanted": 2, "fixed": (Host("h0", 2),), "min_ranks": 3},
        {"wanted": 2, "fixed": (Host("h0", 2),), "max_ranks": 1},
        {"wanted": 2, "fixed": (Host("h0", 2),), "discovery": Discovery("hosts")},
    ],
)
def test_placement_refuses_contradictions(arguments: dict):
    with pytest.raises(ConfigError, match="Received: "):
        Placement(**arguments)


def test_host_of_rank_counts_slots():
    hosts = parse_hosts("h0:2,h1:1")
    assert [host_of_rank(hosts, rank) for rank in range(4)] == ["h0", "h0", "h1", None]


def test_placement_knows_which_hosts_would_make_a_difference():
    placement = Placement(2, (), Discovery("hosts"), min_ranks=1, max_ranks=3)
    ranks, hosts = placement.first(parse_hosts("h0:1,h1:1"))
    placement.lost.add("h3")
    for text, changes in (
        ("h0:1,h1:1", False),
        ("h1:1,h0:1", False),
        ("h1:1,h0:1,h3:1", False),  # it is lost
        ("h0:1,h1:2", True),
        ("h0:1", True),
        ("h0:1,h1:1,h2:1", True),
    ):
        assert placement.would_change(ranks, hosts, parse_hosts(text)) is changes, text
    assert placement.would_change(ranks, hosts, ())
    assert placement.lost == {"h3"} and placement.order == ["h0", "h1"]
    assert placement.later(parse_hosts("h1:1,h0:1")) == (2, hosts)


def test_discovery_reads_what_a_script_prints(tmp_path: Path):
    def script(text: str) -> Discovery:
        path = tmp_path / "hosts"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return Discovery(f"{path} argument", slots=4)

    assert script("echo h0:2; echo; echo h1").hosts() == (Host("h0", 2), Host("h1", 4))
    assert script("true").hosts() == ()
    assert script("echo $1:1").hosts() == (Host("argument", 1),)
    assert script("sleep 60").hosts(stopped=lambda: True) == ()
    for text, what in (("echo oops >&2; exit 3", "status 3.*oops"), ("echo h0:x", "h0:x")):
        with pytest.raises(LaunchError, match=f"host discovery script must be .*{what}"):
            script(text).hosts()
    (tmp_path / "hosts").chmod(0o644)
    with pytest.raises(LaunchError, match="cannot be run"):
        Discovery(str(tmp_path / "hosts")).hosts()
