"""fit goes on when ranks are killed, and ends with the weights, history and predictions of one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_ddl.errors import RankLostError
from keras_ddl.strategy import survival
from launch.launching import Ended, run, write_program

PROGRAM = str(Path(__file__).with_name("surviving_training.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


@cache
def of_one_process(model: str, data: str) -> list:
    ended = subprocess.run([sys.executable, PROGRAM, model, data], capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])[2:]


def of_ranks(
    tmp_path: Path, ranks: int, *arguments: str, options: tuple[str, ...] = (), **env: str
) -> tuple[Ended, list[list]]:
    command = ["run", "-np", str(ranks), "--min-np", "1", *options, "python", PROGRAM, *arguments]
    ended = run(command, tmp_path, env=env)
    assert ended.status == 0, ended
    lines = [re.sub(r"^\[\d\] ", "", line) for line in ended.out.splitlines()]
    return ended, sorted(json.loads(line) for line in lines if line.startswith("["))


def check(
    tmp_path: Path,
    model: str,
    data: str,
    where: str,
    *killed: str,
    ranks: int = 3,
    options: tuple[str, ...] = (),
    **env: str,
) -> None:
    """`options`, `env`: for keras-ddl run."""
    ended, left = of_ranks(tmp_path, ranks, model, data, where, *killed, options=options, **env)
    lost = {int(each.partition(":")[0]) for each in killed}
    assert [each[0] for each in left] == [rank for rank in range(ranks) if rank not in lost], ended
    assert [each[1] for each in left] == list(range(ranks - len(lost))), ended
    assert ended.err.count(" was lost (killed by SIGKILL); ") == len(lost), ended
    history, weights, predicted = of_one_process(model, data)
    for _, _, seen, values, made in left:
        assert seen.keys() == history.keys()
        for name in history:
            np.testing.assert_allclose(seen[name], history[name], rtol=1e-12, err_msg=f"{name}\n{ended}")
        for one, other in zip(values, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(made, predicted, rtol=1e-10, atol=1e-12)


def test_a_rank_is_killed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    check(tmp_path, "mlp", "arrays", "step", "1:7")


@pytest.mark.long
@pytest.mark.parametrize("model", ["cnn", "lstm", "attention"])
def test_models(model: str, tmp_path: Path) -> None:
    check(tmp_path, model, "arrays", "step", "2:6")


@pytest.mark.long
@pytest.mark.parametrize("data", ["dataset", "open", "sequence", "generator", "several"])
def test_data(data: str, tmp_path: Path) -> None:
    check(tmp_path, "mlp", data, "step", "1:5")


@pytest.mark.long
@pytest.mark.parametrize("moment", ["between 1:0", "between 2:6", "test 1:5", "epoch 1:1", "step 1:0", "step 1:4 2:4"])
def test_moments(moment: str, tmp_path: Path) -> None:
    check(tmp_path, "mlp", "dataset", *moment.split())


@pytest.mark.long
def test_all_but_one_are_killed_one_after_the_other(tmp_path: Path) -> None:
    check(tmp_path, "mlp", "arrays", "step", "3:2", "1:6", "2:11", ranks=4)


@pytest.mark.long
def test_rank_0_is_killed(tmp_path: Path) -> None:
    """It has written for all: the job ends, and --restarts begins it again."""
    ended = run(["run", "-np", "3", "--min-np", "1", "python", PROGRAM, "mlp", "arrays", "step", "0:6"], tmp_path)
    assert ended.status == 137, ended
    assert "rank 0 on host" in ended.err and "failed first, and the job was ended: killed by SIGKILL" in ended.err


UNLIKE = """
import keras, numpy as np, tensorflow as tf
import keras_ddl
strategy = keras_ddl.Strategy(seed=3)
if strategy.rank == 1:
    plain = tf.random.shuffle
    tf.random.shuffle = lambda value, *more: plain(value, *more)[::-1]
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(40.0).reshape(20, 2)
try:
    model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=SHUFFLE)
except keras_ddl.errors.RankMismatchError as error:
    assert "must read the same batches" in str(error), error
    print("refused", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_other_orders_of_arrays_are_refused_as_in_other_jobs(shuffle: bool | str, tmp_path: Path) -> None:
    program = write_program(tmp_path, UNLIKE.replace("SHUFFLE", repr(shuffle)))
    ended = run(["run", "-np", "2", "--min-np", "1", "python", program], tmp_path)
    assert ended.status == 0 and ended.out.count("refused") == 2, ended


def test_a_state_that_came_in_part_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that gives it dies meanwhile: no real one can be made to, between two variables."""
    variables = [tf.Variable(1.0), tf.Variable(2.0)]

    def broadcast(given: list[tf.Variable], root: int) -> None:
        given[0].assign(10.0)
        raise RankLostError("rank 1 died")

    monkeypatch.setattr(survival.Communicator, "recover", None)
    monkeypatch.setattr(survival.communicator, "rank", lambda: 0)
    monkeypatch.setattr(survival.communicator, "all_gather_object", lambda mine, name: [mine, (1, False)])
    monkeypatch.setattr(survival.ops, "broadcast_variables", broadcast)
    behind = survival.Survival()
    with pytest.raises(RankLostError):
        behind._catch_up(lambda: variables, None)
    assert [float(each) for each in variables] == [1.0, 2.0]
