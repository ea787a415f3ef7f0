"""Ranks that are killed in the middle of a job whose program goes on without them: keras_ddl.regroup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.event_lines import read_events
from harness.needed_parts import needs_part
from keras_ddl import parts
from launch.launching import Ended, run, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

# Sums of 300 steps. A step that was not finished on all ranks is made again by those that are left; one that some have
# finished is taken from them. PLAN is {rank: [step, how it ends]}, by the numbers of the launcher.
PROGRAM = """
import json, signal
import numpy as np
import keras_ddl
from keras_ddl import communicator
from keras_ddl.errors import RankLostError
keras_ddl.init()
ME, PLAN = keras_ddl.rank(), {int(rank): end for rank, end in json.loads(sys.argv[1]).items()}

def end(when):
    step, how = PLAN.get(ME, (None, None))
    if when == step:
        if how == "error": raise ValueError("my own")
        if how == "vanish": os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

total, step, sizes = 0.0, 0, [keras_ddl.size()]
while step < 300:
    try:
        end(step)
        x = communicator.all_reduce_array(np.full(100, float(step)), name="x")
        total, step = total + x[0] / keras_ddl.size(), step + 1
    except (RankLostError, keras_ddl.errors.DeadlineError):
        while True:
            end("regroup")
            try:
                place = keras_ddl.regroup()
                end("regrouped")
                step, total = max(keras_ddl.all_gather_object((step, total)))
                break
            except RankLostError:
                pass
        sizes.append(place.size)
comm = keras_ddl.split("all")
assert comm is None or comm.size == keras_ddl.size()
print(json.dumps([ME, keras_ddl.rank(), total, sizes]), flush=True)
"""


EVENTS = [] if parts.is_missing("--events") else ["--events", "events.jsonl"]


def job(tmp_path: Path, ranks: int, least: int, plan: dict[int, tuple[int | str, str]], **env: str) -> Ended:
    program = write_program(tmp_path, PROGRAM)
    options = [word for name, value in env.items() for word in ("-x", f"{name}={value}")]
    numbers = ["-np", str(ranks), "--min-np", str(least), *EVENTS]
    arguments = ["run", *numbers, *options, "python", program, json.dumps(plan)]
    return run(arguments, tmp_path)


def left(ended: Ended) -> list[list]:
    assert ended.status == 0, ended
    lines = [re.sub(r"^\[\d(, was \d)?\] ", "", line) for line in ended.out.splitlines()]
    return sorted(map(json.loads, lines))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_others_go_on_when_one_is_killed(rank: int, tmp_path: Path) -> None:
    ended = job(tmp_path, 3, 2, {rank: (100, "kill")})
    others = [each for each in range(3) if each != rank]
    total = 300 * 299 / 2
    assert left(ended) == [[each, place, total, [3, 2]] for place, each in enumerate(others)], ended
    assert f"keras-ddl: rank {rank} was lost (killed by SIGKILL); 2 go on." in ended.err, ended
    prefixes = re.findall(r"^\[(.*?)\] ", ended.out, re.MULTILINE)
    # The first of those that are left is shown as rank 0 was, the other one by what rank() is there, and its number.
    assert [each for each in prefixes if each != "1, was 2"] == (["1"] if rank == 2 else []), ended
    assert len(prefixes) == 1, ended
    assert "Traceback" not in ended.err, ended
    if EVENTS:
        check_events(tmp_path / "events.jsonl", rank, others)


def check_events(path: Path, lost: int, others: list[int]) -> None:
    start, *events, end = read_events(path)
    assert (start["event"], start["ranks"], end["event"], end["status"]) == ("start", 3, "end", 0)
    by_name: dict[str, list[dict]] = {}
    for each in events:
        by_name.setdefault(each["event"], []).append(each)
    assert by_name.keys() == {"rank_start", "rank_end", "rank_lost"}
    pids = {each["rank"]: each["pid"] for each in by_name["rank_start"]}
    assert {each["rank"]: each["pid"] for each in by_name["rank_end"]} == pids and len(pids) == 3
    died, *rest = by_name["rank_end"]
    assert (died["rank"], died["signal"], died["lost"]) == (lost, "SIGKILL", True)
    assert sorted((each["rank"], each["status"], each["lost"]) for each in rest) == [(r, 0, False) for r in others]
    assert [(each["rank"], each["ranks"]) for each in by_name["rank_lost"]] == [(lost, 2)]


@pytest.mark.parametrize("second", [[100, "kill"], ["regroup", "kill"], ["regrouped", "kill"]], ids=str)
def test_a_second_one_is_killed_at_once_or_while_they_regroup(second: list, tmp_path: Path) -> None:
    ended = job(tmp_path, 4, 1, {0: (100, "kill"), 2: tuple(second)})
    (first, last) = left(ended)
    assert (first[:3], last[:3]) == ([1, 0, 300 * 299 / 2], [3, 1, 300 * 299 / 2]), ended
    assert first[3][-1] == last[3][-1] == 2, ended


def test_a_rank_that_stands_still_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    ended = job(tmp_path, 3, 2, {1: (100, "stop")}, KERAS_DDL_DEADLINE_SECONDS="8")
    assert [each[:2] for each in left(ended)] == [[0, 0], [2, 1]], ended
    assert "keras-ddl: rank 1 has not come to the others for 8 s, and is killed." in ended.err, ended


def test_too_few_are_left(tmp_path: Path) -> None:
    ended = job(tmp_path, 3, 3, {1: (100, "kill")})
    assert ended.status == 137, ended
    assert "rank 1 on host" in ended.err and "failed first, and the job was ended: killed by SIGKILL" in ended.err, (
        ended
    )


def test_a_rank_that_ends_with_status_0_in_the_middle_is_lost_and_said_so(tmp_path: Path) -> None:
    ended = job(tmp_path, 3, 2, {1: (100, "vanish")})
    assert [each[:3] for each in left(ended)] == [[0, 0, 300 * 299 / 2], [2, 1, 300 * 299 / 2]], ended
    middle = "ended with status 0 in the middle of the job (sys.exit or os._exit?)"
    assert f"keras-ddl: rank 1 was lost ({middle}); 2 go on.\n" in ended.err, ended
    assert ended.err.endswith(f"keras-ddl: the others have gone on without rank 1: {middle}.\n"), ended
    assert "[1, was 2] [2, 1, " in ended.out, ended  # as rank() says, and the number of the launcher's lines


def test_too_few_are_left_by_a_rank_that_ends_with_status_0(tmp_path: Path) -> None:
    ended = job(tmp_path, 2, 2, {1: (100, "vanish")})
    assert ended.status == 1 and ended.seconds < 60, ended
    assert re.search(r"rank 1 on host .* failed first, .* ended with status 0 in the middle", ended.err), ended


def test_ranks_that_end_by_os_exit_when_all_is_done_are_not_missed(tmp_path: Path) -> None:
    source = "import keras_ddl\nkeras_ddl.init()\nkeras_ddl.barrier()\ntime.sleep(RANK)\nos._exit(0)\n"
    ended = run(["run", "-np", "2", "--min-np", "1", "python", write_program(tmp_path, source)], tmp_path)
    assert ended.status == 0 and not ended.err, ended


def test_an_error_of_the_program_ends_the_job(tmp_path: Path) -> None:
    ended = job(tmp_path, 3, 1, {1: (100, "error")})
    assert ended.status == 1 and ended.err.rstrip().endswith("ValueError: my own"), ended


def test_regroup_is_refused_where_the_launcher_ends_the_job(tmp_path: Path) -> None:
    program = write_program(tmp_path, "import keras_ddl\nkeras_ddl.init()\nkeras_ddl.regroup()")
    ended = run(["run", "-np", "2", "python", program], tmp_path)
    assert ended.status == 1 and "--min-np N" in ended.err.splitlines()[-1], ended


def test_a_job_that_goes_on_is_not_taken_for_one_that_does_not_start(tmp_path: Path) -> None:
    hurried = "import sys; from keras_ddl.launch import supervisor; supervisor.START_SECONDS = 10.0; "
    hurried += "from keras_ddl.cli import main; sys.exit(main())"
    program = write_program(tmp_path, PROGRAM + "\ntime.sleep(12)")
    arguments = ["run", "-np", "3", "--min-np", "2", "python", program, json.dumps({1: (100, "kill")})]
    assert len(left(run(arguments, tmp_path, main=("-c", hurried)))) == 2


LAST = """
import keras_ddl
keras_ddl.init()
if keras_ddl.rank() == 2:
    keras_ddl.barrier()
    while Path("events.jsonl").read_text().count('"rank_end"') < 2: time.sleep(0.02)
    os.kill(os.getpid(), 9)
keras_ddl.barrier()
"""


@needs_part("--events")
def test_no_spare_starts_for_the_last_rank(tmp_path: Path) -> None:
    """It is killed when the others have ended, so there is nobody whom a spare could join."""
    program = write_program(tmp_path, LAST)
    options = ["--min-np", "1", "--spares", "1", "--events", "events.jsonl"]
    ended = run(["run", "-np", "3", *options, "python", program], tmp_path)
    assert ended.status == 137, ended
    assert "a spare" not in ended.err and "killed by SIGKILL" in ended.err, ended
