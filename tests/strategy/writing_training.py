"""A training with every writing callback that survives killed ranks. Run by test_rank_0.py, in one process or on ranks.

writing_training.py FOLDER [WHERE:WHEN:RANK ...]

WHERE   step         WHEN   the optimizer step during which to kill
        HOOK                the step, or for hooks of an epoch the epoch
        collective          the number of collectives that fit has begun
        checkpoint          the number of the directory that Checkpoint is about to publish
        renamed             the number of the directory that Checkpoint has just published

The rank that is rank 0 at the end writes result.json; files, points and predictions also stay in FOLDER.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_ddl
from keras_ddl import communicator, parts
from keras_ddl.communicator.group import Communicator
from keras_ddl.files import durable
from keras_ddl.ops import raw
from keras_ddl.state.callback_state import JobCallback

FOLDER = Path(sys.argv[1])
PLAN = [(where, float(when), int(rank)) for where, when, rank in (each.split(":") for each in sys.argv[2:])]

keras.config.set_floatx("float64")
tf.config.threading.set_intra_op_parallelism_threads(1)
strategy = keras_ddl.Strategy(seed=3) if "KERAS_DDL_RUN_DIR" in os.environ else None
keras.utils.set_random_seed(3)
ME = strategy.rank if strategy is not None else 0
rng = np.random.default_rng(0)
x = rng.normal(size=(90, 12))
y = np.tanh(x).mean(1, keepdims=True)
counts: Counter[str] = Counter()


def kill(where: str, when: float) -> None:
    if (where, when, ME) in PLAN:
        os.kill(os.getpid(), signal.SIGKILL)


def counted(where: str, function, after: bool = False):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        counts[where] += 1
        if not after:
            kill(where, counts[where])
        returned = function(*args, **kwargs)
        if after:
            kill(where, counts[where])
        return returned

    return wrapper


class Kills(JobCallback):
    """Kills in the hooks. `place`: "first" or "last" among callbacks, or "alone"."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        for hook in ("train_begin", "epoch_begin", "epoch_end", "train_batch_begin", "train_batch_end", "train_end"):
            setattr(self, f"on_{hook}", functools.partial(self.kill, hook))
        for hook in ("test_begin", "test_batch_begin", "test_end", "predict_batch_begin"):
            setattr(self, f"on_{hook}", functools.partial(self.kill, hook))

    def kill(self, hook: str, number: object = None, logs: object = None) -> None:
        steps = int(model.optimizer.iterations.numpy())
        when = number if hook.startswith(("epoch", "predict")) else steps
        kill(f"{self.place}-{hook}", when)
        if hook == "train_batch_begin" and self.place == "first":
            threading.Timer(0.01 * rng.random(), kill, ["step", steps]).start()  # at a random moment of the step


with strategy.scope() if strategy is not None else contextlib.nullcontext():
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.2, seed=4), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((12,)), *layers])
    model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=1.0), "mse", metrics=["mae"], jit_compile=False)

for name in ("broadcast_object", "all_gather_object", "all_reduce_array", "barrier"):
    setattr(Communicator, name, counted("collective", getattr(Communicator, name)))
for name in ("broadcast_n", "all_reduce_n"):
    setattr(raw, name, counted("collective", getattr(raw, name)))
durable.publish = counted("renamed", counted("checkpoint", durable.publish), after=True)
FOLDER.mkdir(exist_ok=True)
written = keras.callbacks
callbacks = [
    Kills("first"),
    written.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1)),
    written.CSVLogger(FOLDER / "log.csv", append=(FOLDER / "log.csv").exists()),
    written.TensorBoard(FOLDER / "points", update_freq=1),
    written.ModelCheckpoint(FOLDER / "best.keras", monitor="loss", save_best_only=True),
    written.ModelCheckpoint(FOLDER / "epochs/{epoch}.weights.h5", save_weights_only=True),
    written.BackupAndRestore(FOLDER / "backup", save_freq=2, delete_checkpoint=False),
    written.EarlyStopping(monitor="loss", patience=10),
    *([] if parts.is_missing("timeline") else [keras_ddl.callbacks.StepMetrics(FOLDER / "points" / "job", every=3)]),
    keras_ddl.callbacks.Checkpoint(FOLDER / "ckpt", monitor="loss", keep=99, resume=True),
    Kills("last"),
]
callbacks[-1].runs_last = True
validation = {"validation_data": (x[:30], y[:30]), "validation_batch_size": 12}
history = model.fit(x, y, batch_size=20, epochs=3, verbose=2, callbacks=callbacks, **validation)
points = written.TensorBoard(FOLDER / "points" / "alone")
seen = model.evaluate(x[:50], y[:50], batch_size=10, verbose=0, callbacks=[Kills("alone"), points])
predicted = model.predict(x[:25], batch_size=10, verbose=0, callbacks=[Kills("alone")])
weights = [np.asarray(each).ravel().tolist() for each in (*model.variables, *model.optimizer.variables)]
if strategy is not None and strategy.size > 1:
    of_ranks = communicator.all_gather_object(repr(weights))
    assert all(each == of_ranks[0] for each in of_ranks), "the ranks' weights are not the same"
if strategy is None or strategy.rank == 0:
    result = {"history": history.history, "seen": seen, "predicted": predicted.tolist(), "weights": weights}
    (FOLDER / "result.json").write_text(json.dumps(result))
