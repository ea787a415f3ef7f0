"""Scripts of hvd.elastic whose ranks are killed go on from their last commit."""

import json
import re
from pathlib import Path

import pytest

from launch.launching import run

PROGRAM = str(Path(__file__).with_name("elastic_training.py"))
SURVIVORS = str(Path(__file__).with_name("elastic_survivors.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def told_after(folder: Path, *options: str) -> dict:
    ended = run(["run", "--restarts", "1", *options, "python", PROGRAM], folder)
    assert ended.status == 0, ended
    assert "killed by SIGKILL" in ended.err, ended
    return json.loads((folder / "told.json").read_text())


@pytest.mark.long
def test_killed_elastic_fit_ends_as_one_that_was_not(tmp_path: Path) -> None:
    told = told_after(tmp_path, "-np", "2")
    # Two batches of the second epoch were committed with the first of it; the third was made again.
    assert told == {"resets": [[1, 3, 8]], "seen": True, "equal": True, "size": 2, "attempt": 1}


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
            state.check_host_updates()  # what was not committed is not lost
            time.sleep(0.1)

train(state)
if hvd.rank() == 0:
    ends = [state.sizes[0], state.sizes[-1], hvd.size()]
    Path("told.json").write_text(json.dumps([ends, len(state.sizes) == state.batch > 3, resets == [state.batch]]))
"""


@pytest.mark.long
def test_elastic_job_takes_hosts_that_come_while_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\n[ -e more ] && echo localhost:2 || echo localhost:1\n")
    script.chmod(0o755)
    (tmp_path / "program.py").write_text(GROWING)
    hosts = ["--host-discovery-script", str(script)]
    ended = run(["run", "-np", "1:2", *hosts, "python", "program.py"], tmp_path)
    assert ended.status == 0, ended
    assert "keras-ddl: started again, with 2 ranks on localhost:2 (the hosts have changed)" in ended.err, ended
    assert "failed first" not in ended.err, ended
    assert json.loads((tmp_path / "told.json").read_text()) == [[1, 1, 2], True, True]


@pytest.mark.long
def test_elastic_fit_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\n[ -e dead ] && echo localhost:1 || echo localhost:2\n")
    script.chmod(0o755)
    told = told_after(tmp_path, "-np", "1:2", "--host-discovery-script", str(script))
    assert told["size"] == 1 and told["resets"] == [[1, 3, 8]] and told["seen"], told
    assert not told["equal"]  # the rows of the other rank are missing since


@pytest.mark.long
def test_the_others_go_on_from_their_commit_when_rank_0_is_killed(tmp_path: Path) -> None:
    ended = run(["run", "-np", "2:3", "python", SURVIVORS, "0"], tmp_path)
    assert ended.status == 0, ended
    # The new rank 0's lines begin with no rank.
    left = sorted(json.loads(re.sub(r"^\[[^]]*\] (?=\[)", "", line)) for line in ended.out.splitlines())
    # Batch 7 of the second epoch was lost; 6 of it are in the last commit.
    assert left == [[1, 0, 3, [[2, 1, 6]], True], [2, 1, 3, [[2, 1, 6]], True]], ended
