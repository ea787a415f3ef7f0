"""`strategy.function` loops survive killed ranks with the results of one process, or report why they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_survival import check

from launch.launching import run, write_program

PROGRAM = str(Path(__file__).with_name("surviving_loop.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet, pytest.mark.long]


def test_rank_is_killed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    check(tmp_path, "steps", "-", "step", "1:5", program=PROGRAM)


@pytest.mark.parametrize("kind", ["shards", "gan", "method", "open", "two"])
def test_kinds(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, "-", "step", "2:6", program=PROGRAM)


@pytest.mark.parametrize("kind", ["shards+behind", "behind"])
def test_rank_that_has_not_committed_catches_up(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, "-", "between", "1:6", program=PROGRAM)


CAUGHT = """
import os, signal
import keras, numpy as np, tensorflow as tf
import keras_ddl
from keras_ddl import communicator, ops
from keras_ddl.errors import ConfigError, RankLostError
SHARDS = ...
os.environ["KERAS_DDL_SHARD_FROM_ELEMENTS"] = "1"
strategy = keras_ddl.Strategy(seed=3, sharding="optimizer" if SHARDS else None)
me = strategy.rank
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
optimizer = keras.optimizers.Adam(0.1)

@strategy.function(batches="rank")
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss, tf.shape(x)[0]

number = 0
while number < 8:
    if (me, number) == (1, 4):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss, rows = step(np.full((2 + number % 2, 2), 1.0 + number, np.float32))
        number += 1
    except RankLostError as error:
        rule = "A step can be repeated after a rank is lost only if every"
        assert f"The other ranks do not continue without rank 1. {rule}" in str(error), error
        keras_ddl.regroup()
        number = max(communicator.all_gather_object(number))
        ops.broadcast_variables([*model.variables, *([] if SHARDS else optimizer.variables)])
    except ConfigError as error:
        assert SHARDS and "cannot continue after keras_ddl.regroup()" in str(error), error
        print("refused", flush=True)
        raise SystemExit
assert not SHARDS and strategy.size == 2 and int(rows) == 6, (strategy.size, rows)
seen = communicator.all_gather_object((repr(model.get_weights()), float(loss)))
assert seen[0] == seen[1], seen
print("went on", flush=True)
"""


@pytest.mark.parametrize("shards", [False, True])
def test_program_that_catches_the_error_continues_with_its_strategy(shards: bool, tmp_path: Path) -> None:
    program = write_program(tmp_path, CAUGHT.replace("...", repr(shards), 1))
    ended = run(["run", "-np", "1:3", "python", program], tmp_path)
    assert ended.status == 0 and ended.out.count("refused" if shards else "went on") == 2, ended


WHY = {
    "iterator": "IteratorGetNext",
    "drawn": "RandomStandardNormal (",
    "rows": "batches='rank', with each rank's own rows",
    "collective": "a collective outside of them",
}


@pytest.mark.parametrize("kind", WHY)
def test_errors_say_why_a_job_ends(kind: str, tmp_path: Path) -> None:
    where = "collective" if kind == "collective" else "step"
    ended = run(["run", "-np", "1:3", "python", PROGRAM, kind, "-", where, "1:5"], tmp_path)
    assert ended.status != 0, ended
    messages = [line for line in ended.err.splitlines() if line.startswith("keras-ddl: rank") and "LostError" in line]
    assert messages, ended
    for message in messages:  # one for both ranks, unless they waited for different collectives
        assert "The other ranks do not continue without rank 1. " in message, ended
        assert WHY[kind] in message and "--restarts" in message, ended
