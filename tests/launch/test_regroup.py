"""Ranks killed in the middle of a job whose program continues without them: keras_ddl.regroup.

test_supervisor.py tests the launcher's decisions.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.launching import Ended, run_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

# Adds up 300 steps. The remaining ranks repeat a step that no rank has finished; if some have finished it, the others
# take its result from them. PLAN is {rank: [step, how the rank ends]}, by launch ranks.
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


def job(tmp_path: Path, ranks: int, least: int, plan: dict[int, tuple[int | str, str]]) -> Ended:
    return run_program(tmp_path, PROGRAM, np=f"{least}:{ranks}", words=[json.dumps(plan)])


def left(ended: Ended) -> list[list]:
    assert ended.status == 0, ended
    lines = [re.sub(r"^\[\d(, was \d)?\] ", "", line) for line in ended.out.splitlines()]
    return sorted(map(json.loads, lines))


@pytest.mark.parametrize("rank", [0, *(pytest.param(rank, marks=pytest.mark.long) for rank in (1, 2))])
def test_survivors_continue_after_a_kill(rank: int, tmp_path: Path) -> None:
    ended = job(tmp_path, 3, 2, {rank: (100, "kill")})
    others = [each for each in range(3) if each != rank]
    total = 300 * 299 / 2
    assert left(ended) == [[each, place, total, [3, 2]] for place, each in enumerate(others)], ended
    assert f"keras-ddl: rank {rank} was lost (killed by SIGKILL); 2 ranks continue." in ended.err, ended
    prefixes = re.findall(r"^\[(.*?)\] ", ended.out, re.MULTILINE)
    # The first of the remaining ranks is shown like rank 0, the other one with its new rank and its launch rank.
    assert [each for each in prefixes if each != "1, was 2"] == (["1"] if rank == 2 else []), ended
    assert len(prefixes) == 1, ended
    assert "Traceback" not in ended.err, ended


def test_regroup_is_refused_if_the_launcher_ends_the_job(tmp_path: Path) -> None:
    ended = run_program(tmp_path, "import keras_ddl\nkeras_ddl.init()\nkeras_ddl.regroup()")
    assert ended.status == 1 and "-np MIN:MAX" in ended.err.splitlines()[-1], ended
