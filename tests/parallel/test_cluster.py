"""Several hosts, emulated: what is sent goes over the network, as much as must and no more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.harness import find_mpirun

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "cluster.py"

pytestmark = pytest.mark.parallel


def run_cluster(folder: Path, *options: str) -> dict:
    result = folder / "result.json"
    path = f"{Path(find_mpirun()).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, str(PROGRAM), "--contestants", "keras_ddl", "--rounds", "1", "--json", str(result)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=100, env={**os.environ, "PATH": path}
    )
    if done.returncode == 2:  # no root, no tools, or no namespaces here: it says which
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())


@pytest.mark.parametrize(
    ("options", "links"),
    [
        (("--hosts", "2", "--ranks-per-host", "2,1"), {"h0", "h1"}),
        (("--hosts", "4", "--racks", "2", "--ranks-per-host", "1", "--rack-rate", "200mbit"), {"r0", "r1"}),
    ],
    ids=["uneven hosts", "racks"],
)
def test_bytes_sent_between_hosts_are_the_least_possible(tmp_path, options, links):
    result = run_cluster(tmp_path, *options, "--rate", "1gbit", "--sizes", "4M")
    (row,) = result["rows"]
    assert row["right"]
    assert ("as 2x2" in result["describe"]) == ("r0" in links)  # mode 'p' knows the racks
    assert links <= row["sent_of_expected"].keys()
    for link, ratio in row["sent_of_expected"].items():
        assert 0.97 <= ratio <= 1.08, (link, ratio)
