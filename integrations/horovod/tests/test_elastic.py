"""Scripts with hvd.elastic continue from their last commit after ranks are killed."""

import json
import re
from pathlib import Path

import pytest

from launch.launching import run

PROGRAM = str(Path(__file__).with_name("elastic_training.py"))
SURVIVORS = str(Path(__file__).with_name("elastic_survivors.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def run_result(folder: Path, *options: str) -> dict:
    ended = run(["run", "--restarts", "1", *options, "python", PROGRAM], folder)
    assert ended.status == 0, ended
    assert "killed by SIGKILL" in ended.err, ended
    return json.loads((folder / "result.json").read_text())


@pytest.mark.long
def test_killed_elastic_fit_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    result = run_result(tmp_path, "-np", "2")
    # The commit holds two batches of the second epoch; the third was repeated.
    assert result == {"resets": [[1, 3, 8]], "seen": True, "equal": True, "size": 2, "attempt": 1}


GROWING = """
import json, os, time
from pathlib import Path
import keras_ddl.horovod as hvd
hvd.init()
state = hvd.elastic.ObjectState(batch=0, sizes=[])
resets = []
state.register_reset_callbacks([lambda: resets.append(state.batch)])

@hvd.elastic.run
def train(state):
    while state.batch < 3 or (hvd.size() == 1 and state.batch < 2000):
        state.batch += 1
        state.sizes.append(hvd.size())
        if state.batch == 3:
            Path("more").touch()
        if state.batch == 1:
            state.commit()
        else:
            state.check_host_updates()  # keeps uncommitted progress
            time.sleep(0.1)

train(state)
if hvd.rank() == 0:
    ends = [state.sizes[0], state.sizes[-1], hvd.size()]
    Path("result.json").write_text(json.dumps([ends, len(state.sizes) == state.batch > 3, resets == [state.batch]]))
"""


@pytest.mark.long
def test_elastic_job_accepts_new_hosts_while_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\n[ -e more ] && echo localhost:2 || echo localhost:1\n")
    script.chmod(0o755)
    (tmp_path / "program.py").write_text(GROWING)
    hosts = ["--host-discovery-script", str(script)]
    ended = run(["run", "-np", "1:2", *hosts, "python", "program.py"], tmp_path)
    assert ended.status == 0, ended
    assert "keras-ddl: started again, with 2 ranks on localhost:2 (the hosts have changed)" in ended.err, ended
    assert "failed first" not in ended.err, ended
    assert json.loads((tmp_path / "result.json").read_text()) == [[1, 1, 2], True, True]


@pytest.mark.long
def test_elastic_fit_continues_with_fewer_ranks(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\n[ -e dead ] && echo localhost:1 || echo localhost:2\n")
    script.chmod(0o755)
    result = run_result(tmp_path, "-np", "1:2", "--host-discovery-script", str(script))
    assert result["size"] == 1 and result["resets"] == [[1, 3, 8]] and result["seen"], result
    assert not result["equal"]  # the other rank's rows are missing from then on


@pytest.mark.long
def test_survivors_continue_from_their_commit_when_rank_0_is_killed(tmp_path: Path) -> None:
    ended = run(["run", "-np", "2:3", "python", SURVIVORS, "0"], tmp_path)
    assert ended.status == 0, ended
    # The new rank 0 prints without a rank prefix.
    left = sorted(json.loads(re.sub(r"^\[[^]]*\] (?=\[)", "", line)) for line in ended.out.splitlines())
    # Batch 7 of the second epoch was lost; the last commit holds 6 of its batches.
    assert left == [[1, 0, 3, [[2, 1, 6]], True], [2, 1, 3, [[2, 1, 6]], True]], ended
