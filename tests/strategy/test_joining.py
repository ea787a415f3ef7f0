"""A spare takes the place of a killed rank, and all end with the weights, history and predictions of one process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from launch.launching import run, write_program
from strategy.test_survival import check

EPOCHS = 12
ALONE = str(Path(__file__).with_name("training_alone.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    ended = check(tmp_path, "mlp", "arrays", "step", "1:7", spares=1, epochs=EPOCHS)
    assert "rank 3, a spare, starts, to take the place of rank 1." in ended.err
    assert "rank 1 was lost (killed by SIGKILL); 2 go on." in ended.err and "rank 3 has joined; 3 go on." in ended.err


@pytest.mark.long
def test_optimizers_in_shards_are_shared_out_to_a_spare(tmp_path: Path) -> None:
    check(tmp_path, "shards", "arrays", "step", "1:7", spares=1, epochs=EPOCHS)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("killed", "spares"),
    [("0:3 1:10 2:17", 3), ("1:5 3:30", 2), ("1:5 2:0:joining", 2), ("1:5 0:250:joining", 2), ("1:5 3:400:joining", 1)],
)
def test_others_are_killed_before_and_while_a_spare_gets_its_shards(killed: str, spares: int, tmp_path: Path) -> None:
    """The last one: the spare itself."""
    check(tmp_path, "shards", "arrays", "step", *killed.split(), spares=spares, epochs=8 + 8 * spares)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shards", "weights"])
def test_a_spare_joins_the_last_rank_which_had_all_that_is_in_shards(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, "arrays", "step", "1:7", ranks=2, spares=1, epochs=EPOCHS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_ranks_are_killed_at_random_moments_of_a_joining(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    first, other = rng.sample(range(3), 2)
    second = rng.choice([other, 3])  # or the spare
    killed = [f"{first}:{rng.randrange(3, 8)}", f"{second}:{rng.randrange(800)}:joining"]
    check(tmp_path, "shards", "arrays", "step", *killed, spares=1 if second == 3 else 2, epochs=20)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_a_spare_joins_a_fit_that_one_rank_alone_has_begun(kind: str, tmp_path: Path) -> None:
    """And has what the fit of another model before it has left."""
    check(tmp_path, kind, "arrays", "step", "1:2", ranks=2, spares=1, epochs=EPOCHS, program=ALONE)


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
            self.model.optimizer.learning_rate = 1e-3 * (1 + 0.01 * len(seen))  # never again the same
        if KIND == "raises" and NUMBER == 2 and len(done) > 3: raise ValueError("of the newcomer alone")
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
class Find(keras.callbacks.Callback):
    def __init__(self): super().__init__(); self.losses = []
    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 1.5
if NUMBER == 2: Path("came").touch()
if KIND == "finder":  # of learning rates, in a fit that has ended when the newcomer comes
    start, find = model.get_weights(), Find()
    model.fit(x, x[:, :1], batch_size=4, callbacks=[find], verbose=0)
    model.set_weights(start)
    model.optimizer.learning_rate = 1e-3 * 1.5 ** int(np.argmin(find.losses))
history = model.fit(x, x[:, :1], batch_size=4, epochs=40, callbacks=[Own(), Kill()], verbose=0)
print("trained", len(history.epoch), *(f"{each:.4f}" for each in np.ravel(model.get_weights()[0])), flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        ("closure", "DriftError: "),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("epoch", "DriftError: "),
                ("layer", "RankMismatchError: "),
                ("raises", "ValueError: of the newcomer alone"),
                ("generator", None),
                ("finder", None),
            )
        ),
    ],
)
def test_a_spare_whose_program_keeps_other_state_leaves_by_name_and_the_others_go_on(
    kind: str, leaves: str | None, tmp_path: Path
) -> None:
    program = write_program(tmp_path, OWN_STATE.replace("KIND", repr(kind)))
    alone = run(["run", "-np", "1", "python", program], tmp_path)
    ended = run(["run", "-np", "2", "--min-np", "1", "--spares", "1", "python", program], tmp_path)
    assert ended.status == 0 and ended.out.splitlines()[0] == alone.out.strip(), (alone, ended)
    assert "rank 2 has joined; 2 go on." in ended.err, ended
    said = [line for line in ended.err.splitlines() if line.startswith("keras-ddl: rank 2, a newcomer, leaves (")]
    assert len(said) == (leaves is not None) and (leaves is None or leaves in said[0]), ended


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
