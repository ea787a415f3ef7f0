"""A spare replaces a killed rank, and all ranks end with the weights, history and predictions of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_survival import check

from launch.launching import run, write_program

EPOCHS = 12
pytestmark = [pytest.mark.parallel, pytest.mark.quiet, pytest.mark.long]


@pytest.mark.parametrize(
    "model",
    [
        "cnn",
        "lstm",
        "attention",
        "unlike",
        "shards+two",
        "shards+saving",
        "shards+accumulation",
        "weights",
        "weights+saving",
    ],
)
def test_models(model: str, tmp_path: Path) -> None:
    check(tmp_path, model, "arrays", "step", "2:6", spares=1, epochs=EPOCHS)


@pytest.mark.parametrize("data", ["dataset", "open", "sequence", "generator", "several"])
def test_data(data: str, tmp_path: Path) -> None:
    check(tmp_path, "mlp", data, "step", "1:5", spares=1, epochs=EPOCHS)


@pytest.mark.parametrize(
    ("killed", "spares", "epochs"),
    [
        ("0:3 1:10 2:17", 3, 32),
        ("1:5 3:30", 2, 24),
        ("1:5 2:0:joining", 2, 24),
        ("1:5 0:250:joining", 2, 24),
        ("1:5 3:400:joining", 1, 6),  # the spare itself is killed, and the ranks wait in vain: few epochs
    ],
)
def test_ranks_are_killed_before_and_while_a_spare_gets_its_shards(
    killed: str, spares: int, epochs: int, tmp_path: Path
) -> None:
    check(tmp_path, "shards", "arrays", "step", *killed.split(), spares=spares, epochs=epochs)


@pytest.mark.parametrize("kind", ["shards", "weights"])
def test_spare_joins_the_last_rank_with_all_shards(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, "arrays", "step", "1:7", ranks=2, spares=1, epochs=EPOCHS)


OWN_STATE = """
import time
import keras, numpy as np
import keras_ddl
strategy = keras_ddl.Strategy(seed=3)
NUMBER = int(os.environ.get("KERAS_DDL_HOST_RANK", "0/1").split("/")[0])
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="tanh")])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
x = np.arange(40.0).reshape(20, 2) / 40
seen = []
done = []
class Own(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(1)
    def on_train_batch_begin(self, batch, logs=None):
        if KIND == "generator":  # can be given to a newcomer
            self.model.optimizer.learning_rate = self.random.uniform(1e-4, 1e-2)
        if KIND == "closure":
            seen.append(batch)
            self.model.optimizer.learning_rate = 1e-3 * (1 + 0.01 * len(seen))  # differs in every step
    def on_epoch_begin(self, epoch, logs=None):
        if KIND == "layer" and epoch > 0 and NUMBER != 2:
            self.model.layers[0].activation = keras.activations.relu
            self.model.make_train_function(force=True)
    def on_epoch_end(self, epoch, logs=None):
        if KIND == "epoch":
            seen.append(epoch)
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel * (1 - 0.001 * len(seen)))
class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        done.append(batch)
        if NUMBER == 1 and len(done) == 9: os.kill(os.getpid(), 9)
        time.sleep(0 if Path("came").exists() or SIZE == 1 else 0.3)
SIZE = keras_ddl.size()
if NUMBER == 2: Path("came").touch()
history = model.fit(x, x[:, :1], batch_size=4, epochs=40, callbacks=[Own(), Kill()], verbose=0)
print("trained", len(history.epoch), *(f"{each:.4f}" for each in np.ravel(model.get_weights()[0])), flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        ("closure", "DriftError: "),
        ("epoch", "DriftError: "),
        ("layer", "RankMismatchError: "),
        ("generator", None),
    ],
)
def test_spare_with_differing_state_leaves_and_others_continue(kind: str, leaves: str | None, tmp_path: Path) -> None:
    program = write_program(tmp_path, OWN_STATE.replace("KIND", repr(kind)))
    alone = run(["run", "-np", "1", "python", program], tmp_path)
    ended = run(["run", "-np", "1:2", "--spares", "1", "python", program], tmp_path)
    assert ended.status == 0 and ended.out.splitlines()[0] == alone.out.strip(), (alone, ended)
    assert "rank 2 has joined; 2 ranks continue." in ended.err, ended
    messages = [line for line in ended.err.splitlines() if line.startswith("keras-ddl: rank 2, a newcomer, leaves (")]
    assert len(messages) == (leaves is not None) and (leaves is None or leaves in messages[0]), ended


def test_unused_spares_end_with_the_job(tmp_path: Path) -> None:
    ended = run(["run", "-np", "1:2", "--spares", "1", "python", "-c", "print('ran')"], tmp_path)
    assert ended.status == 0 and ended.out.count("ran") == 2 and "spare" not in ended.err, ended
