"""Runs PyTorch's own backend tests, DistributedTest as its wheel ships it, on ranks started by keras-ddl run.

    keras-ddl run -np 4 python integrations/torch/tests/own_tests.py FOLDER [PATTERN]

FOLDER: empty, shared by the ranks. PyTorch's tests start processes; here the ranks already exist, and each test
gets its own process group. Rank 0 prints a line for each test: passed, skipped or failed, and why.

Of 285 in PyTorch 2.13.0, on 4 ranks, 87 pass and none fails. 86 skip themselves without 2 or 4 GPUs, 21 below 8 ranks,
and 7 because PyTorch has switched them off. 84 are left out: 56 need GPUs (or torchvision), 11 look for gloo's names in
the profiler, 7 call torch.distributed.monitored_barrier, which requires gloo, 4 look for gloo's message for a
timeout, 3 use sparse tensors, which are refused, and 3 names of backends or the environment of torchrun.
"""

import fnmatch
import os
import re
import sys
import traceback
import unittest
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path

import keras_ddl.torch  # noqa: F401  (registers the backend, sets RANK and WORLD_SIZE)
from keras_ddl import communicator

# PyTorch's tests do not know "ddl". A CPU backend must pass what they test for gloo.
os.environ.update(BACKEND="gloo", TEMP_DIR=sys.argv[1])

import torch.testing._internal.common_distributed as common
import torch.testing._internal.distributed.distributed_test as theirs
from torch import distributed as dist
from torch.testing._internal.common_utils import set_rng_seed

PATTERN = sys.argv[2] if len(sys.argv) > 2 else "test_*"
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
REASONS = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
# Tests that do not concern this backend, by a part of their names.
LEFT_OUT = {
    "cuda": "GPUs",
    "nccl": "GPUs",
    "gpu": "GPUs",
    "Backend_enum_class": "lists PyTorch's own backends",
    "dump_DDP_relevant_env_vars": "the environment that torchrun sets",
    "monitored_barrier": "torch.distributed.monitored_barrier takes gloo by name",
    "barrier_timeout": "expects gloo's words for a timeout",
    "SyncBatchNorm": "GPUs, or torchvision",
    "isend_irecv_mixed_backend_err": "GPUs",
    "isend_irecv_op_err": "GPUs",
    "test_get_backend": "expects the name gloo",
    "sparse": "sparse tensors, which are refused",
    "profiling": "names that PyTorch's profiler gives to gloo",
    "profiler": "names that PyTorch's profiler gives to gloo",
}


class Own(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    """PyTorch's tests, with these ranks as their processes."""

    rank = RANK

    @classmethod
    def setUpClass(cls):
        pass

    def setUp(self):
        pass

    def tearDown(self):
        pass

    def join_or_run(self, test):
        return test

    @property
    def world_size(self):
        return SIZE


def run(name):
    """Returns how a test ended, and why. COLLECTIVE."""
    reason = next((reason for part, reason in LEFT_OUT.items() if part in name), None)
    if reason is not None:
        return "left out", reason
    folder = Path(sys.argv[1])
    for each in ("barrier", "test_dir", "init_dir"):
        (folder / each).mkdir(exist_ok=True)
    dist.init_process_group("ddl", timeout=timedelta(seconds=20))
    for each in (folder / "test_dir").iterdir():
        each.unlink(missing_ok=True)
    dist.barrier()
    set_rng_seed()
    environment = dict(os.environ)
    try:
        getattr(Own(name), name)()
        ended = ("passed", "")
    except unittest.SkipTest as why:
        ended = ("skipped", str(why))
    except SystemExit as left:
        ended = ("skipped", REASONS.get(left.code, f"exit status {left.code}"))
    except Exception:
        ended = ("failed", traceback.format_exc())
    os.environ.update(environment)  # some tests leave it changed
    found = communicator.all_gather_object(ended)
    if dist.is_initialized():
        dist.destroy_process_group()
    return max(found, key=lambda each: ("passed", "skipped", "failed").index(each[0]))


def main():
    # Their barrier uses files, so that it works even if the backend is broken. Here it is not.
    theirs.Barrier.sync = classmethod(lambda *_, **__: dist.barrier())
    warnings.simplefilter("ignore")
    counts = Counter()
    for name in sorted(fnmatch.filter(dir(Own), PATTERN)):
        ended, why = run(name)
        counts[ended] += 1
        if RANK == 0:
            print(f"{ended}: {name}{': ' if why else ''}{why}", flush=True)
    if RANK == 0:
        print(re.sub(r"^Counter\(|\)$", "", str(counts)), flush=True)


if __name__ == "__main__":
    main()
