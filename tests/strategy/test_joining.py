"""A spare takes the place of a killed rank, and all end with the weights, history and predictions of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.launching import run, write_program
from strategy.test_survival import check

EPOCHS = 12
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    ended = check(tmp_path, "mlp", "arrays", "step", "1:7", spares=1, epochs=EPOCHS)
    assert "rank 3, a spare, starts, to take the place of rank 1." in ended.err
    assert "rank 1 was lost (killed by SIGKILL); 2 go on." in ended.err and "rank 3 has joined; 3 go on." in ended.err


@pytest.mark.long
@pytest.mark.parametrize("model", ["cnn", "lstm", "attention", "unlike"])
def test_models(model: str, tmp_path: Path) -> None:
    check(tmp_path, model, "arrays", "step", "2:6", spares=1, epochs=EPOCHS)


@pytest.mark.long
@pytest.mark.parametrize("data", ["dataset", "open", "sequence", "generator", "several"])
def test_data(data: str, tmp_path: Path) -> None:
    check(tmp_path, "mlp", data, "step", "1:5", spares=1, epochs=EPOCHS)


@pytest.mark.long
def test_the_spare_is_killed_and_another_one_comes(tmp_path: Path) -> None:
    check(tmp_path, "mlp", "arrays", "step", "1:5", "3:30", spares=2, epochs=25)


@pytest.mark.long
def test_all_ranks_are_replaced_one_after_the_other(tmp_path: Path) -> None:
    check(tmp_path, "mlp", "arrays", "step", "0:3", "1:10", "2:17", spares=3, epochs=40)


OTHER_DATA = """
import time
import keras, numpy as np, tensorflow as tf
import keras_ddl
strategy = keras_ddl.Strategy(seed=3)
is_spare = RANK == 2
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(40.0).reshape(20, 2) + is_spare
class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if RANK == 1: os.kill(os.getpid(), 9)
        time.sleep(0 if Path("came").exists() else 0.5)
if is_spare: Path("came").touch()
data = dict(x=x, y=x[:, :1], batch_size=4) if KIND == "arrays" else dict(
    x=tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4))
history = model.fit(**data, epochs=40, callbacks=[Kill()], verbose=0)
print("trained", len(history.epoch), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_spare_that_has_other_data_ends_and_the_others_go_on(kind: str, tmp_path: Path) -> None:
    program = write_program(tmp_path, OTHER_DATA.replace("KIND", repr(kind)))
    ended = run(["run", "-np", "2", "--min-np", "1", "--spares", "1", "python", program], tmp_path)
    assert ended.status == 0 and ended.out.strip() == "trained 40", ended
    assert "RankMismatchError: " in ended.err, ended


TOO_FEW = """
import keras, numpy as np
import keras_ddl
strategy = keras_ddl.Strategy(seed=3, min_ranks=2)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(40.0).reshape(20, 2)
class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if RANK == 1 and batch == 2: os.kill(os.getpid(), 9)
model.fit(x, x[:, :1], batch_size=4, callbacks=[Kill()], verbose=0)
"""


@pytest.mark.long
def test_a_strategy_may_ask_for_more_ranks_than_the_job(tmp_path: Path) -> None:
    program = write_program(tmp_path, TOO_FEW)
    ended = run(["run", "-np", "2", "--min-np", "1", "python", program], tmp_path)
    assert ended.status != 0 and "Received: 1 left, and min_ranks=2 (rank 0)" in ended.err, ended


@pytest.mark.long
def test_spares_that_nobody_needs_end_with_the_job(tmp_path: Path) -> None:
    ended = run(["run", "-np", "2", "--min-np", "1", "--spares", "1", "python", "-c", "print('ran')"], tmp_path)
    assert ended.status == 0 and ended.out.count("ran") == 2 and "spare" not in ended.err, ended
