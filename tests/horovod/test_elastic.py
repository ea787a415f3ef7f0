"""Scripts of hvd.elastic whose ranks are killed go on from their last commit."""

import json
from pathlib import Path

import pytest

from launch.launching import run

PROGRAM = str(Path(__file__).with_name("elastic_training.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def told_after(folder: Path, *options: str) -> dict:
    ended = run(["run", "--restarts", "1", *options, "python", PROGRAM], folder)
    assert ended.status == 0, ended
    assert "killed by SIGKILL" in ended.err, ended
    return json.loads((folder / "told.json").read_text())


def test_killed_elastic_fit_ends_as_one_that_was_not(tmp_path: Path) -> None:
    told = told_after(tmp_path, "-np", "2")
    # Two batches of the second epoch were committed with the first of it; the third was made again.
    assert told == {"resets": [[1, 3, 8]], "seen": True, "equal": True, "size": 2, "attempt": 1}


@pytest.mark.long
def test_torn_commit_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    told = told_after(tmp_path, "-np", "1")
    assert told["resets"] == [[1, 1, 6]] and told["seen"] and told["equal"], told


@pytest.mark.long
def test_elastic_fit_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\n[ -e asked ] && echo localhost:1 || echo localhost:2\ntouch asked\n")
    script.chmod(0o755)
    told = told_after(tmp_path, "-np", "2", "--min-np", "1", "--host-discovery-script", str(script))
    assert told["size"] == 1 and told["resets"] == [[1, 3, 8]] and told["seen"], told
    assert not told["equal"]  # the rows of the other rank are missing since
