"""Jobs on several hosts that continue when ranks or a host are lost: keras-ddl run --hosts ... -np MIN:."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.emulated_hosts import Hosts, emulated_hosts
from keras_ddl.launch.regroup.regrouping import doors
from launch.launching import Ended, Started, eventually, kill, processes, run, write_program
from launch.test_regroup import PROGRAM, left
from launch.test_run_hosts import kill_host, needs_hosts, write_agent

pytestmark = [pytest.mark.parallel, pytest.mark.quiet, needs_hosts]
TOTAL = 300 * 299 / 2
SLOW = PROGRAM.replace("end(step)\n", "end(step); time.sleep(0.02); step == 5 and here('up')\n")


@pytest.fixture
def agent(tmp_path: Path) -> str:
    """Returns a replacement for ssh: hosts that differ by name, on one network."""
    return write_agent(tmp_path)


def arguments(tmp_path: Path, least: int, plan: dict[int, list], program: str = PROGRAM) -> list[str]:
    name = write_program(tmp_path, program)
    return ["run", "--hosts", "h0:2,h1:2", "-np", f"{least}:", "python", name, json.dumps(plan)]


def test_survivors_continue_after_a_rank_on_another_host_is_killed(agent: str, tmp_path: Path) -> None:
    ended = run(arguments(tmp_path, 2, {3: [100, "kill"]}), tmp_path, env={"KERAS_DDL_SSH": agent})
    assert left(ended) == [[each, each, TOTAL, [4, 3]] for each in range(3)], ended
    assert "keras-ddl: rank 3 was lost (killed by SIGKILL); 3 ranks continue." in ended.err, ended
    assert "Traceback" not in ended.err, ended


@pytest.mark.long
@pytest.mark.parametrize("how", ["regroup", "regrouped"])
def test_second_rank_is_killed_during_the_regroup(how: str, agent: str, tmp_path: Path) -> None:
    ended = run(arguments(tmp_path, 1, {0: [100, "kill"], 3: [how, "kill"]}), tmp_path, env={"KERAS_DDL_SSH": agent})
    assert [each[:3] for each in left(ended)] == [[1, 0, TOTAL], [2, 1, TOTAL]], ended


@pytest.mark.long
def test_survivors_continue_after_a_host_is_lost(agent: str, tmp_path: Path) -> None:
    started = Started(arguments(tmp_path, 2, {}, SLOW), tmp_path, env={"KERAS_DDL_SSH": agent})
    started.wait_for(*(tmp_path / f"up-{rank}" for rank in range(4)))
    started.may_leave = ("keras_ddl-",)  # no process is left on that host to remove it
    kill_host(started.mark, "h1")
    ended = started.finish()
    assert left(ended) == [[0, 0, TOTAL, [4, 2]], [1, 1, TOTAL, [4, 2]]], ended
    assert "keras-ddl: rank 3 was lost (sent no report of its end); 2 ranks continue." in ended.err, ended


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.long
def test_starter_of_a_hosts_ranks_may_be_killed(agent: str, tmp_path: Path) -> None:
    started = Started(arguments(tmp_path, 2, {}, SLOW), tmp_path, env={"KERAS_DDL_SSH": agent})
    started.wait_for(*(tmp_path / f"up-{rank}" for rank in range(4)))
    found = [pid for pid, line in processes(started.mark).items() if "host_ranks --from-stdin" in line]
    starters = [pid for pid in found if parent(pid) not in found]  # the wrappers are its forks
    assert len(starters) == 2
    for pid in starters:
        kill(pid)
    ended = started.finish()
    assert left(ended) == [[each, each, TOTAL, [4]] for each in range(4)], ended


NOTING = SLOW.replace("here('up')", "Path(f'up-{ME}').write_text(str(os.getpid()))")


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["one", "several"])
def test_rank_0_is_killed_with_its_starter(hosts: str, agent: str, tmp_path: Path) -> None:
    """Kills the starter of its host's ranks, its wrapper, and rank 0 at once. On one host that ends the job."""
    command = arguments(tmp_path, 2, {}, NOTING)
    command = command if hosts == "several" else ["run", "-np", "2:4", *command[5:]]
    started = Started(command, tmp_path, env={"KERAS_DDL_SSH": agent})
    note = tmp_path / "up-0"
    started.wait_for(*(tmp_path / f"up-{rank}" for rank in range(4)))
    assert eventually(lambda: bool(note.read_text()))
    rank_0 = int(note.read_text())
    wrapper = parent(rank_0)
    for pid in (parent(wrapper), wrapper, rank_0):
        kill(pid)
    ended = started.finish()
    if hosts == "several":
        assert left(ended) == [[each, each - 1, TOTAL, [4, 3]] for each in range(1, 4)], ended
        assert "keras-ddl: rank 0 was lost (sent no report of its end); 3 ranks continue." in ended.err, ended
    else:  # whichever end is noticed first, the rank's or its starter's
        first = "failed first, and the job was ended: sent no report of its end" in ended.err
        other = "host_ranks ended (killed by SIGKILL) before the ranks had finished." in ended.err
        assert ended.out == "" and ((ended.status == 1 and first) or (ended.status == 137 and other)), ended


@pytest.mark.long
@pytest.mark.parametrize("hosts", [["-np", "2:4"], ["--hosts", "h0:2,h1:2", "-np", "2:"]], ids=["one", "several"])
def test_survivors_continue_after_a_wrapper_is_killed(hosts: list[str], agent: str, tmp_path: Path) -> None:
    slow = SLOW.replace("os.kill(os.getpid(),", "os.kill(os.getppid() if how == 'wrapper' else os.getpid(),")
    command = arguments(tmp_path, 2, {3: [10, "wrapper"]}, slow)
    ended = run(["run", *hosts, *command[5:]], tmp_path, env={"KERAS_DDL_SSH": agent})
    assert left(ended) == [[each, each, TOTAL, [4, 3]] for each in range(3)], ended
    assert "keras-ddl: rank 3 was lost (sent no report of its end); 3 ranks continue." in ended.err, ended


@pytest.mark.long
def test_job_restarts_if_too_few_ranks_remain(agent: str, tmp_path: Path) -> None:
    program = PROGRAM.replace("def end(", "if os.environ['KERAS_DDL_RESTART'] == '1': PLAN = {}\n\ndef end(")
    command = arguments(tmp_path, 2, {2: [50, "kill"], 3: [50, "kill"], 1: [150, "kill"]}, program)
    command[1:1] = ["--restarts", "1"]
    ended = run(command, tmp_path, env={"KERAS_DDL_SSH": agent})
    assert left(ended) == [[each, each, TOTAL, [4]] for each in range(4)], ended
    assert "2 ranks continue." in ended.err and "restart 1 of 1, with 4 ranks on h0:2,h1:2" in ended.err, ended


def test_ranks_beside_the_launcher_have_the_address_that_other_hosts_use() -> None:
    def link(rank: int, address: str, reached_at: str) -> SimpleNamespace:
        door = {"address": address, "port": 4000 + rank, "host": "h"}
        return SimpleNamespace(outcome=SimpleNamespace(rank=rank), door=door, reached_at=reached_at)

    beside, other = link(0, "127.0.0.1", "127.0.0.1"), link(2, "10.0.0.2", "10.0.0.1")
    assert doors([beside, other]) == {0: {**beside.door, "address": "10.0.0.1"}, 2: other.door}
    assert doors([beside]) == {0: beside.door}


def test_unreachable_host_is_named(tmp_path: Path) -> None:
    ended = run(arguments(tmp_path, 2, {}), tmp_path, env={"KERAS_DDL_SSH": "false"})
    assert ended.status == 1, ended
    assert re.search(
        r"The ranks of host h[01] could not be started: false ended with status 1\. Check that `false h[01] true` ",
        ended.err,
    ), ended


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Hosts]:
    with emulated_hosts(tmp_path, 2) as hosts:
        yield hosts


@pytest.mark.long
def test_survivors_continue_after_a_hosts_network_is_cut(cluster: Hosts, tmp_path: Path) -> None:
    """Nothing reports the loss, so the ranks and the launcher must notice the silence.

    Later the network comes back. The cut-off ranks, which consider the others lost, end before or then.
    """
    note = "step == 5 and Path(f'pid-{ME}').write_text(str(os.getpid()))\n"
    program = PROGRAM.replace("end(step)\n", f"end(step); time.sleep(0.1); {note}")
    env = {"KERAS_DDL_SSH": cluster.agent_path, "KERAS_DDL_LOST_AFTER_SECONDS": "3"}
    words = [sys.executable, "-m", "keras_ddl.cli", *arguments(tmp_path, 2, {}, program)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(cluster.command(words), cwd=tmp_path, env={**os.environ, **env}, **pipes)
    notes = [tmp_path / f"pid-{rank}" for rank in range(4)]
    assert eventually(lambda: all(each.exists() and each.read_text() for each in notes))
    cut = time.monotonic()
    cluster.cut("h1")
    assert process.stderr is not None
    said = [process.stderr.readline().decode() for _ in range(2)]
    assert all(
        re.search(r"rank [23] was lost \(sent no report of its end\); 2 ranks continue\.", line) for line in said
    ), said
    assert time.monotonic() - cut < 60  # takes 3 s, unless the machine is busy
    cluster.cut("h1", off=False)
    outside = [Path("/proc", each.read_text()) for each in notes[2:]]
    assert eventually(lambda: not any(each.exists() for each in outside), 20)
    assert process.poll() is None
    out, err = process.communicate(timeout=120)
    ended = Ended(process.returncode, out.decode(), err.decode(), time.monotonic() - cut)
    assert left(ended) == [[0, 0, TOTAL, [4, 2]], [1, 1, TOTAL, [4, 2]]], ended
