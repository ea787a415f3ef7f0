"""How training with backend "ddl" ends under keras-ddl run: normally, interrupted, and when a rank dies."""

import re
from pathlib import Path

import pytest
from torch_needs import TORCH

from launch.launching import Ended, run, write_program

pytestmark = [TORCH, pytest.mark.parallel, pytest.mark.quiet]

TRAINING = """
import signal
import torch
import torch.distributed as dist
import keras_ddl.torch
dist.init_process_group("ddl")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
def step(): model(torch.ones(4, 300)).sum().backward()
for _ in range(5): step()
"""


def run_two(program: str, folder: Path) -> Ended:
    # Importing DistributedDataParallel creates a folder for compiled programs, which stays.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return run(["run", "-np", "2", "python", program], folder, env=env)


def test_error_on_one_rank_is_explained_and_ends_the_others(tmp_path: Path):
    program = write_program(
        tmp_path,
        TRAINING + 'if RANK == 1: raise ValueError("no such thing: 42")\nwhile True: step()\n',
    )
    ended = run_two(program, tmp_path)
    assert ended.status == 1, ended
    assert ended.err.splitlines()[-1] == "ValueError: no such thing: 42", ended


@pytest.mark.long
def test_program_without_destroy_ends_normally(tmp_path: Path):
    program = write_program(
        tmp_path,
        TRAINING + "dist.all_reduce(torch.ones(3), async_op=True).get_future()\nprint('end', flush=True)\n",
    )
    ended = run_two(program, tmp_path)
    assert (ended.status, ended.err) == (0, ""), ended
    assert ended.out.count("end") == 2


@pytest.mark.long
def test_interrupt_ends_waiting_ranks(tmp_path: Path):
    program = write_program(
        tmp_path,
        TRAINING
        + """
if RANK == 0:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        dist.all_reduce(torch.ones(3), async_op=True).wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise SystemExit(3)
time.sleep(600)
""",
    )
    ended = run_two(program, tmp_path)
    assert ended.status == 3, ended
    assert "interrupted" in ended.out


@pytest.mark.long
def test_one_process_needs_no_launcher(tmp_path: Path):
    import subprocess
    import sys

    program = write_program(tmp_path, TRAINING + "assert dist.get_world_size() == 1\nprint('end')\n")
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def run_three(end: str, folder: Path) -> Ended:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    program = write_program(folder, f"{TRAINING}if RANK == 1: {end}\nwhile True: step()\n")
    return run(["run", "-np", "3", "python", program], folder, env=env)


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "killed by SIGKILL"),
        ("sys.exit(3)", 3, "ended with exit status 3"),
    ],
)
def test_rank_missing_in_a_step_is_blamed(end: str, status: int, words: str, tmp_path: Path):
    ended = run_three(end, tmp_path)
    assert ended.status == status, ended
    assert re.search(f"rank 1 on host .* failed first, and the job was ended: {words}", ended.err), ended
