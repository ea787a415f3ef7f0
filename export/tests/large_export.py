"""Exports the checkpoint directory argv[1] to argv[2] and prints the peak memory.

Two gigabytes of weights must pass in parts. TensorFlow's own memory is measured before and subtracted.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

import tensorflow  # noqa: F401

from keras_ddl.export import export_saved_model


def peak() -> int:
    # Not getrusage, whose peak a process inherits from the one that started it.
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


before = peak()
result = export_saved_model(sys.argv[1], sys.argv[2])
measured = {
    "own": peak() - before,
    "proof": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,  # at least the clean process's
    "files": sorted(file.name for file in Path(result.path, "variables").iterdir()),
    "bytes": result.bytes,
    "proved": result.proof,
    "seconds": dict(result.seconds),
}
print("result:" + json.dumps(measured))
