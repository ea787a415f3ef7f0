"""Runs tests of the core and of parts again on software GPUs: tests/device/native/device.cc."""

import os
import subprocess
import sys
import tempfile

import pytest

from device import software_gpu
from harness.source_modules import ROOT

pytestmark = [pytest.mark.long, pytest.mark.parallel]

HOROVOD = "integrations/horovod/tests"
RUNS = {
    "ops": ["tests/ops/test_ops_on_ranks.py::test_ops_of_two"],
    "strategy": ["tests/strategy/test_strategy.py::test_of_two"],  # also checkpoints and shards
    "programs": ["tests/strategy/test_strategy.py::test_further"],
    "shards": ["tests/strategy/test_strategy.py::test_shards"],
    "mesh": ["tests/strategy/test_mesh.py::test_mesh"],
    "survival": [
        "resilience/tests/test_survival.py::test_rank_is_killed_in_the_middle_of_a_step",
        "resilience/tests/test_survival.py::test_spare_replaces_a_killed_rank",
        "resilience/tests/test_survival.py::test_models",
    ],
    "Horovod": [f"{HOROVOD}/test_horovod.py::test_horovod_of_two"],
    "Horovod's training": [f"{HOROVOD}/test_horovod_training.py::test_training"],  # also in sessions
}
# Tests that differ on a software GPU, and why.
OTHERWISE = {
    "check_jit_compile_is_refused": "XLA has no compiler for it, which TensorFlow says first",
    "compiled": "the same",
    "check_mixed_precision_gathers_halves": "the scale of its loss adds int64 in a tf.cond, and it has no such kernel",
    "check_spectral_normalization": "sums in a tf.cond, the same",
    "check_failure_while_another_rank_waits_for_input": "an assertion's text is in a tf.cond, the same",
    "check_arrays_of_every_kind": "it has no kernels for a Dense layer on sparse rows",
    "check_ctc_in_an_endpoint_layer": "GRU uses cuDNN if there is a GPU",
    "lstm": "LSTM, too",
    "check_nondeterministic_pipelines_are_refused": "deterministic kernels make pipelines deterministic, too",
    # When the data ends, one process has counted another iteration only if the GPU was faster than the data.
    "check_generator_loses_no_rows": "iterations differ in one process",
    "check_data_of_unknown_length_counts_iterations_and_seeds_as_one_process": "the same",
}


@pytest.mark.parametrize("name", RUNS)
def test_on_software_gpus(name):
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "", "-k", f"not ({' or '.join(OTHERWISE)})"]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    # In their own folder these tests do not wait for this one.
    with tempfile.TemporaryDirectory(prefix="software-gpu-") as folder:
        variables |= {**software_gpu.environment(), "TMPDIR": folder}
        command = [sys.executable, "-m", "pytest", *options, *RUNS[name]]
        ended = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ended.returncode == 0, ended.stdout.decode()
