"""Jobs in a real Slurm with two nodes: training, killed ranks, cancelled jobs, signals before the time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.packaging_tools import ROOT
from harness.slurm import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.alone]
BIN = Path(sys.executable).parent

TRAIN = """
import keras, numpy as np, keras_ddl
strategy = keras_ddl.Strategy()
keras.utils.set_random_seed(7)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
random = np.random.default_rng(7)
x = random.normal(size=(100, 8)).astype("float32")
model.fit(x, x.sum(1, keepdims=True), batch_size=30, epochs=2, shuffle=False, verbose=0)
print("rank", keras_ddl.rank(), "of", keras_ddl.size(), flush=True)
if keras_ddl.rank() == 0:
    np.savez("weights.npz", *model.get_weights())
"""

HELLO = """
import os, numpy as np, keras_ddl
from keras_ddl import communicator
keras_ddl.init()
total = communicator.all_reduce_array(np.array([keras_ddl.rank() + 1.0]))
print(f"rank {keras_ddl.rank()} of {keras_ddl.size()} sum {total[0]:g} node {os.environ['SLURM_NODEID']}", flush=True)
"""

# Runs until it is stopped, and prints SIGUSR1.
STEPS = """
import os, signal, time, numpy as np, keras_ddl
from keras_ddl import communicator
keras_ddl.init()
signal.signal(signal.SIGUSR1, lambda *_: print("notice on rank", keras_ddl.rank(), flush=True))
print("rank", keras_ddl.rank(), "is process", os.getpid(), flush=True)
while True:
    communicator.all_reduce_array(np.ones(10))
    time.sleep(0.05)
"""


def batch(folder: Path, *lines: str) -> Path:
    script = folder / "job.sbatch"
    script.write_text("\n".join(("#!/bin/bash", "#SBATCH --nodes=2 --ntasks=2", *lines, "")))
    return script


def process_of(output: Path, rank: int, seconds: float = 40) -> int:
    """Waits until a rank of STEPS has started; returns its pid."""
    found: list[str] = []

    def started() -> bool:
        found[:] = re.findall(rf"rank {rank} is process (\d+)", output.read_text() if output.exists() else "")
        return bool(found)

    wait_until(started, seconds, lambda: output.read_text() if output.exists() else "no output")
    return int(found[0])


def check_nothing_is_left_behind(process: int, folder: Path) -> None:
    def left() -> list[str]:
        # The job's processes have its directory in their command lines.
        shown = subprocess.run(["pgrep", "-af", str(folder)], capture_output=True, text=True).stdout
        return [line for line in shown.splitlines() if "defunct" not in line]

    wait_until(lambda: not Path(f"/proc/{process}").exists() and not left(), 15, lambda: str(left()))


def test_docs_batch_script_equals_one_process(slurm, pmix, folder):
    import numpy as np

    (folder / "train.py").write_text(TRAIN)
    subprocess.run([sys.executable, "-P", "train.py"], cwd=folder, check=True)
    with np.load(folder / "weights.npz") as file:
        alone = [file[name] for name in file.files]
    (folder / "weights.npz").unlink()

    script = ROOT / "deploy" / "slurm.sbatch"
    (folder / "bin").mkdir()
    (folder / "bin" / "activate").write_text(f"PATH={BIN}:$PATH")
    job, output = slurm.submit(script, f"--chdir={folder}", VENV=str(folder))
    state = slurm.ended(job, 90)
    assert state["JobState"] == "COMPLETED", output.read_text()
    assert state["NumNodes"] == "2"
    assert set(re.findall(r"rank \d of \d", output.read_text())) == {"rank 0 of 2", "rank 1 of 2"}
    with np.load(folder / "weights.npz") as file:
        for ours, theirs in zip([file[name] for name in file.files], alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun_with_pmix_starts_ranks_of_open_mpi(nodes, slurm, pmix):
    done = slurm.run("srun", f"--nodes={nodes}", "--ntasks=2", pmix, sys.executable, "-c", HELLO)
    assert done.returncode == 0, done.stdout
    last = nodes - 1
    assert set(done.stdout.splitlines()) >= {"rank 0 of 2 sum 3 node 0", f"rank 1 of 2 sum 3 node {last}"}


def test_srun_with_pmi2_starts_ranks_of_mpich_and_intel_mpi(slurm, pmi2_venv):
    # On one node, because Intel MPI needs a network between two, even if both are one machine.
    done = slurm.run("srun", "--nodes=1", "--ntasks=2", "--mpi=pmi2", pmi2_venv.python, "-c", HELLO)
    assert done.returncode == 0, done.stdout
    assert set(done.stdout.splitlines()) >= {"rank 0 of 2 sum 3 node 0", "rank 1 of 2 sum 3 node 0"}


def test_srun_with_the_wrong_pmi_is_an_error_that_names_the_right_one(slurm):
    done = slurm.run("srun", "--nodes=1", "--ntasks=2", "--mpi=none", sys.executable, "-c", HELLO)
    assert done.returncode != 0
    assert "Slurm's srun started 2 processes" in done.stdout
    assert "srun --mpi=pmix" in done.stdout


@pytest.mark.parametrize("nodes", [1, 2])
def test_run_uses_ranks_and_nodes_of_the_allocation(nodes, slurm):
    command = ("salloc", "--quiet", f"--nodes={nodes}", "--ntasks=2", BIN / "keras-ddl", "run", "python", "-c", HELLO)
    done = slurm.run(*command)
    assert done.returncode == 0, done.stdout
    assert "rank 0 of 2 sum 3" in done.stdout
    assert "[1] rank 1 of 2 sum 3" in done.stdout
    if nodes == 2:
        assert "[1] rank 1 of 2 sum 3 node 1" in done.stdout


def test_killed_rank_ends_an_srun_job(slurm, pmix, folder):
    (folder / "steps.py").write_text(STEPS)
    job, output = slurm.submit(batch(folder, f"srun {pmix} {sys.executable} {folder}/steps.py"))
    os.kill(process_of(output, 1), signal.SIGKILL)
    state = slurm.ended(job, 20)
    assert state["JobState"] == "FAILED"
    assert re.search(r"RankLostError: rank 1 on host \S+ \(process \d+\) died", output.read_text())
    check_nothing_is_left_behind(process_of(output, 0), folder)


def test_killed_rank_ends_a_run_job_with_its_status(slurm, folder):
    (folder / "steps.py").write_text(STEPS)
    job, output = slurm.submit(batch(folder, f"exec {BIN}/keras-ddl run {folder}/steps.py"))
    os.kill(process_of(output, 1), signal.SIGKILL)
    state = slurm.ended(job, 20)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", f"{128 + signal.SIGKILL}:0")
    assert re.search(r"rank 1 on host \S+ failed first, and the job was ended: killed by SIGKILL", output.read_text())
    check_nothing_is_left_behind(process_of(output, 0), folder)


@pytest.mark.parametrize("start", ["srun --mpi=pmix", "exec keras-ddl run"])
def test_cancelled_job_leaves_nothing_behind(start, slurm, pmix, folder):
    (folder / "steps.py").write_text(STEPS)
    job, output = slurm.submit(batch(folder, f"PATH={BIN}:$PATH", f"{start} python {folder}/steps.py"))
    process = process_of(output, 0)
    process_of(output, 1)
    slurm.run("scancel", job)
    assert slurm.ended(job, 20)["JobState"] == "CANCELLED"
    check_nothing_is_left_behind(process, folder)


def test_signal_before_the_time_limit_reaches_every_rank_of_srun(slurm, pmix, folder):
    (folder / "steps.py").write_text(STEPS)
    line = f"srun {pmix} {sys.executable} {folder}/steps.py"
    # Slurm counts minutes, and may send the signal up to one minute early.
    job, output = slurm.submit(batch(folder, "#SBATCH --time=1 --signal=USR1@40", line))
    process_of(output, 1)
    wait_until(lambda: output.read_text().count("notice on rank") == 2, 40, output.read_text)
    assert slurm.state(job)["JobState"] == "RUNNING"
    slurm.run("scancel", job)
    slurm.ended(job, 20)


def test_signal_to_the_batch_script_ends_run_with_its_status(slurm, folder):
    """--signal=B:TERM sends the same as scancel --batch; with `exec`, keras-ddl gets it."""
    (folder / "steps.py").write_text(STEPS)
    job, output = slurm.submit(batch(folder, f"exec {BIN}/keras-ddl run {folder}/steps.py"))
    process = process_of(output, 1)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    state = slurm.ended(job, 20)
    assert state["ExitCode"] == f"{128 + signal.SIGTERM}:0"
    assert "keras-ddl: SIGTERM: stopping the ranks." in output.read_text()
    check_nothing_is_left_behind(process, folder)
