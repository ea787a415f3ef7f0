"""IBM's names on several ranks, and in a process without other ranks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.rank_tests import rank_tests
from keras_ddl.ddl import job
from keras_ddl.ddl.dump import summary
from keras_ddl.errors import NotInitializedError

HERE = Path(__file__).parent
CHECKS = [HERE / f"{name}_checks.py" for name in ("graph", "start", "keras")]

# Checking every name once, on two ranks, is enough.
NAMES = HERE / "name_checks.py"

test_ddl = rank_tests([*CHECKS, NAMES], [2], env={"DDL_OPTIONS": "-mode p:2x1"})
test_ddl_of_three = pytest.mark.long(
    rank_tests(CHECKS, [3], env={"DDL_OPTIONS": "-mode b:3x1 -dump_iter 4", "DDL_GROUP_SIZE": "100"})
)

ALONE = """
import ddl
import tensorflow.compat.v1 as tf
from keras_ddl.errors import ConfigError, NotInitializedError

assert (ddl.rank(), ddl.size(), ddl.local_rank(), ddl.num_hosts()) == (0, 1, 0, 1)
ddl.init("-mode b:2x1")
for call in (lambda: ddl.bcast(1.0), lambda: ddl.allreduce_n([]), lambda: ddl.grads_reduce([])):
    try:
        call()
    except NotInitializedError as error:
        assert "ddlrun" in str(error)
    else:
        raise AssertionError("no error")
try:
    ddl.init("-modes p")
except ConfigError as error:
    assert "-modes" in str(error)
else:
    raise AssertionError("no error")
try:
    ddl.Init
except AttributeError as error:
    assert "allreduce_n" in str(error)
else:
    raise AssertionError("no error")
with tf.Graph().as_default(), tf.Session() as session:
    w = tf.Variable(1.0)
    train = tf.train.GradientDescentOptimizer(0.5).minimize(w * w)
    session.run(tf.global_variables_initializer())
    session.run(train)
    assert session.run(w) == 0.0
callbacks = [ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()]
for each in callbacks:
    each.on_train_begin()
print("done")
"""


def test_ddl_alone_is_rank_0_of_size_1():
    environment = {**os.environ, "DDL_OPTIONS": "-mode p:4x2"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]


def test_missing_options_error_names_ddlrun(monkeypatch):
    monkeypatch.setattr(job, "is_alone", lambda: False)
    monkeypatch.setattr(job.communicator, "is_initialized", lambda: False)  # another test may have initialised it
    with pytest.raises(NotInitializedError, match=r"`ddlrun`, which sets DDL_OPTIONS.*or call ddl.init\(\)"):
        job.rank()


def test_dump_names_the_last_rank():
    # Rank 1 arrives 3 ms and 1 ms after rank 0; the reductions take 1 ms and 2 ms.
    line = summary(np.array([[0.004, 0.001], [0.003, 0.002]]), first=11)
    assert line.startswith("reductions 11 to 12: 1.500 ms on average, 1.000 to 2.000;")
    assert "rank 1, ready 2.000 ms after the first rank on average, 3.000 at most" in line
