"""Memory per mesh rank for a model with 1.6 GB of weights and slots on four model ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launching import python_path
from harness.rank_tests import run_ranks

PROGRAM = Path(__file__).parent / "mesh_memory.py"
WIDTH, BLOCKS, LIMIT = 1448, 8, 1100
pytestmark = [pytest.mark.long, pytest.mark.alone]


def measured_in(text):
    line = next((each for each in text.splitlines() if each.startswith("measured")), None)
    return None if line is None else json.loads(line.partition(" ")[2])


def on_ranks(*arguments):
    env = {"PYTHONPATH": python_path(PROGRAM.parent.parent)}
    done = run_ranks(PROGRAM, 4, args=[*map(str, arguments)], timeout=500, env=env)
    done.check()
    return measured_in(done.ranks[0].stdout)


def test_rank_fits_a_memory_limit_that_one_process_exceeds():
    command = [sys.executable, str(PROGRAM), str(WIDTH), str(BLOCKS), "--alone", "--limit", str(LIMIT)]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert alone.returncode != 0 and measured_in(alone.stdout) is None, alone.stdout
    mine, narrow = on_ranks(WIDTH, BLOCKS, "--limit", LIMIT), on_ranks(32, BLOCKS)
    assert mine["share"] * 4 > 1500
    assert mine["tensors"] < 1.15 * mine["share"], mine
    # Compare with a narrow network of as many layers, because TensorFlow's allocator never returns memory.
    assert mine["peak"] - narrow["peak"] < 1.25 * mine["share"], (mine, narrow)
