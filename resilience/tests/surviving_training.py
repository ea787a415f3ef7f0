"""A training that survives killed ranks. Run by test_survival.py, in one process or on several ranks.

surviving_training.py MODEL DATA [WHERE RANK:WHEN[:WHERE] ...]
    MODEL: mlp, cnn, lstm, attention, tables; variants of the mlp: shards, weights (also sharded), accumulation, eager,
        compiled (a custom train_step that calls XLA), two (optimizers), unlike (newcomers first trace another step),
        teacher (state that only a closure knows, and Keras's global generator), behind (rank 2, if rank 1 is lost
        during the commit of step 5: committed 1:5), saving; A+B combines both. meshM: on a mesh with M model ranks,
        whose layout cuts every axis that M divides; with "chosen" keras_ddl chooses the layout
    DATA: arrays, dataset, open, sequence, generator, several
    WHERE: step, between, test, epoch, gather, never; moment (WHEN: milliseconds after the second execution began);
        recovery (milliseconds after this rank began to continue without another one); joining (milliseconds after it
        began to admit a newcomer, or to join as one)

It prints [initial rank, final rank, history, weights, predictions] as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_ddl
from keras_ddl import communicator, ops
from keras_ddl.compat import keras as keras_compat
from keras_ddl.cut.shards import table_rows
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.step.execution import Execution

ROWS, BATCH, EPOCHS = 90, 20, int(os.environ.get("EPOCHS", "3"))
MODEL, DATA = sys.argv[1:3]
WHERE = sys.argv[3] if len(sys.argv) > 3 else "never"
KILLED = {
    int(rank): (int(when), (*where, WHERE)[0]) for rank, when, *where in (each.split(":") for each in sys.argv[4:])
}

keras.config.set_floatx("float64")
tf.config.threading.set_intra_op_parallelism_threads(1)
KIND, MODEL = MODEL, next((each for each in ("cnn", "lstm", "attention", "tables") if each in MODEL.split("+")), "mlp")
IN_SHARDS = "shards" in KIND or "weights" in KIND
ON_MESH = re.search(r"mesh(\d)", KIND)
os.environ["KERAS_DDL_SHARD_FROM_ELEMENTS"] = "10"
table_rows.USUAL_LINES = 1  # otherwise small tables would be gathered once the last batch makes sizes unknown


def layout_map(model_ranks: int) -> keras.distribution.LayoutMap:
    mesh = keras_ddl.device_mesh((keras_ddl.init().size // model_ranks, model_ranks))
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*first/kernel"] = (None, "model")
    layout[".*(first/bias|batch_normalization/(gamma|beta|moving_mean|moving_variance))"] = ("model",)
    layout[".*last/kernel"] = ("model", None)
    layout[".*attention/(query|key|value)/kernel"] = (None, "model", None)
    layout[".*attention/(query|key|value)/bias"] = ("model", None)
    layout[".*attention/attention_output/kernel"] = ("model", None, None)
    return layout


strategy = None
if "KERAS_DDL_RUN_DIR" in os.environ:
    layout = None if not ON_MESH else int(ON_MESH[1]) if "chosen" in KIND else layout_map(int(ON_MESH[1]))
    sharding = "weights" if "weights" in KIND else "optimizer" if IN_SHARDS else None
    strategy = keras_ddl.Strategy(seed=3, sharding=sharding, layout=layout)
keras.utils.set_random_seed(3)
ME = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))  # the launcher's number
AWAITED = int(os.environ.get("AWAITED", "0"))  # with fewer ranks, training is slow and no further rank is killed
UNTIL = os.environ.get("UNTIL")  # training is slow until this file exists; FILE-RANK marks the start
PAUSE = 1.0 if AWAITED else 0.3  # seconds per slow step; grows in case a newcomer is late on few cores
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 8, 6))
y = np.tanh(x).mean((1, 2), keepdims=True)[:, 0]
layers = keras.layers


def kill(where: str, when: int) -> None:
    whose_turn = KILLED.get(ME, (0, "never"))
    if AWAITED and where != "joining":  # some time after all of them have joined
        whose_turn = (when, whose_turn[1]) if whose_turn[0] <= when and strategy.size == AWAITED else (-1, "")
    if whose_turn == (when, where):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_later(where: str) -> None:
    when, where_killed = KILLED.get(ME, (0, "never"))
    if where_killed == where:
        threading.Timer(when / 1000, kill, [where, when]).start()


def regroup_with(admits: object = None) -> object:
    kill_later("recovery" if admits is None else "joining")
    return plain_regroup(admits)


def join_others(is_over: object) -> object:
    kill_later("joining")
    return plain_join(is_over)


plain_regroup, communicator.regroup_with = communicator.regroup_with, regroup_with
plain_join, communicator.join_others = communicator.join_others, join_others


def built(kind: str) -> list[keras.layers.Layer]:
    if kind == "mlp":
        units = 16 if not ON_MESH or "by8" in KIND else 12
        first = layers.Dense(units, activation="relu", name="first")
        return [layers.Flatten(), first, layers.BatchNormalization(name="batch_normalization")]
    if kind == "cnn":
        return [layers.Conv1D(8, 3, activation="relu"), layers.BatchNormalization(), layers.GlobalAveragePooling1D()]
    if kind == "lstm":
        return [layers.LSTM(8)]
    if kind == "tables":
        return [layers.Flatten(), Words(), layers.Embedding(200, 4), layers.Flatten(), layers.Dense(4)]
    inputs = keras.Input((8, 6))
    seen = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=5, name="attention")(inputs, inputs)
    return [keras.Model(inputs, layers.LayerNormalization()(seen)), layers.Flatten()]


class Words(layers.Layer):
    """Word ids computed from the numbers."""

    def call(self, x):
        return tf.cast(40.0 * tf.abs(x), "int64") % 200


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows]


def endless():
    while True:
        for index in range(len(Batches())):
            yield Batches()[index]


def data() -> dict[str, object]:
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=5).batch(BATCH)
    if DATA == "dataset":
        return {"x": dataset}
    if DATA == "open":  # of unknown length: the first epoch ends with the data
        return {"x": dataset.filter(lambda rows, _: tf.shape(rows)[0] > 0)}
    if DATA == "sequence":
        return {"x": Batches()}
    if DATA == "generator":
        return {"x": endless(), "steps_per_epoch": 4}
    return {"x": x, "y": y, "batch_size": BATCH}


def kill_in_gathers() -> None:
    """Kills a rank during a gathering of slots at the start of a save."""
    gather, calls = ops.all_to_all, itertools.count()

    def all_to_all(*args, **kwargs):
        if "keras_ddl/slots/" in str(kwargs.get("name")):
            kill("gather", next(calls))
        return gather(*args, **kwargs)

    ops.all_to_all = all_to_all


sizes = []  # numbers of ranks after each step of this rank; as an attribute of a callback, newcomers would receive it


class Killer(keras.callbacks.Callback):
    steps, has_begun, pauses = 0, False, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if strategy is not None:
            sizes.append(strategy.size)
        if strategy is not None and (strategy.size < AWAITED or not Path(UNTIL or ".").exists()):
            time.sleep(min(PAUSE * 1.05**self.pauses, 10.0))
            self.pauses += 1
        if UNTIL and self.steps == 1:
            Path(f"{UNTIL}-{ME}").touch()

    def on_train_batch_begin(self, batch, logs=None):
        steps = int(model.optimizer._iterations.numpy())
        kill("between", steps)
        if steps > 0 and not self.has_begun:
            self.has_begun = True
            kill_later("moment")
        threading.Timer(0.01 * rng.random(), kill, ["step", steps]).start()  # at a random moment of the step

    def on_test_batch_begin(self, batch, logs=None):
        kill("test", int(model.optimizer.iterations.numpy()))

    def on_predict_batch_begin(self, batch, logs=None):
        if KILLED.get(ME, (0, "never"))[1] in ("moment", "recovery"):
            time.sleep(30)  # waits for the moment

    def on_epoch_end(self, epoch, logs=None):
        kill("epoch", epoch)


def traces(model):
    return strategy.keras_steps.step_of(model, "train_step").traces


@tf.function(jit_compile="compiled" in KIND)
def squared(difference):
    return difference * difference


teacher = tf.Variable(tf.zeros([8, 6], tf.float64), name="teacher")
lesson = tf.Variable("none", name="lesson")


def taught(x):
    """Returns noisy rows plus the teacher's notes on earlier rows."""
    noisy = x + 0.01 * keras.random.normal(tf.shape(x)) + teacher
    teacher.assign(0.5 * teacher + 0.01 * tf.reduce_mean(noisy, 0))
    lesson.assign(tf.strings.as_string(tf.reduce_sum(teacher), precision=6))
    return noisy


class OwnStep(keras.Sequential):
    """A train_step with two updates by two optimizers; the second reads the first one's writes."""

    def __init__(self, layers):
        super().__init__(layers)
        self.second = keras.optimizers.Adam(0.003)

    def train_step(self, data):
        x, y = data
        if "unlike" in KIND and ME >= AWAITED > 0 and traces(self) < 2:
            x += 0.0
        if "teacher" in KIND:
            x = taught(x)
        for optimizer, weights in ((self.optimizer, self.trainable_weights), (self.second, self.layers[-1].weights)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(squared(y - self(x, training=True)))
            if optimizer is self.optimizer or "two" in KIND:
                optimizer.apply(tape.gradient(loss, weights), weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, self(x))
        return {metric.name: metric.result() for metric in self.metrics}


with strategy.scope() if strategy is not None else contextlib.nullcontext():
    model_class = OwnStep if {"two", "compiled", "unlike", "teacher"} & set(KIND.split("+")) else keras.Sequential
    model = model_class([keras.Input((8, 6)), *built(MODEL), layers.Dropout(0.2, seed=4), layers.Dense(1, name="last")])
    several = {"gradient_accumulation_steps": 3} if "accumulation" in KIND else {}
    model.compile(
        keras.optimizers.AdamW(0.01, global_clipnorm=1.0, **several),
        "mse",
        metrics=["mae"],
        steps_per_execution=2 if DATA == "several" else 1,
        jit_compile=False,
        run_eagerly="eager" in KIND,
    )
if "behind" in KIND and strategy is not None:
    # Rank 1 is lost during the commit of step 5, when rank 0 has committed it and rank 2 has not.
    run, calls = Execution.run, itertools.count()
    has_committed = Path("rank-0-has-committed")

    def falls_behind(execution, data, make):
        if execution.step != "train_step" or next(calls) != 5:
            return run(execution, data, make)
        used = [each for trace in execution.traces for each in trace.graph.variables]
        before = [each.read_value() for each in used]
        outputs = run(execution, data, make)
        if ME == 0:
            has_committed.touch()
        elif ME == 1:
            while not has_committed.exists():
                time.sleep(0.01)
            kill("committed", 5)
        else:
            for variable, value in zip(used, before):
                variable.assign(value)
            communicator.barrier("not_of_all")  # fails as soon as rank 1 is lost
        return outputs

    Execution.run = falls_behind

kills = Killer()
callbacks = [kills]
if "saving" in KIND:
    kill_in_gathers()
    folder = tempfile.TemporaryDirectory() if strategy is None else None  # otherwise in the test's folder
    saved_at = "saved.keras" if folder is None else f"{folder.name}/saved.keras"
    callbacks.append(keras.callbacks.ModelCheckpoint(saved_at))
in_shards = IN_SHARDS and strategy is not None and strategy.size > 1
history = model.fit(
    **data(), epochs=EPOCHS, verbose=0, validation_data=(x[:30], y[:30]), validation_batch_size=12, callbacks=callbacks
)
history.history["steps"] = [kills.steps]  # like a counting callback of the program
predicted = model.predict(x[:25], batch_size=10, verbose=0, callbacks=[Killer()])
if AWAITED:  # newcomers traced the step before joining, and the others kept their trace
    if IN_SHARDS:  # no rank traces ahead: all trace together, each time that ranks join
        joinings = sum(after > before for before, after in itertools.pairwise(sizes))
        # One more if a rank was lost between the same two steps.
        assert traces(model) - joinings in (1, 2), (ME, traces(model), sizes)
    else:
        assert traces(model) == (2 if "unlike" in KIND else 1), (ME, traces(model))
if in_shards:
    assert gathered_slots.slots_of(model)
    assert strategy.size == 1 or "mirror " in strategy.explain(model)
    assert strategy.size == 1 or MODEL != "tables" or "rows of tables" in strategy.explain(model)
if ON_MESH and strategy is not None:
    mesh = strategy.job.mesh
    print(f"mesh {'none' if mesh is None else (mesh.data.size, mesh.model.size)}", file=sys.stderr, flush=True)
with strategy.whole_model(model) if strategy is not None else contextlib.nullcontext():
    variables = [*model.variables, *model.optimizer.variables, *(model.second.variables if "two" in KIND else [])]
    if "teacher" in KIND:
        variables += [teacher, keras_compat.global_seed_generator().state]
        history.history["lesson"] = [float(lesson.numpy())]
    weights = [np.asarray(each).ravel().tolist() for each in variables]
if "saving" in KIND:
    saved = keras.models.load_model(saved_at)
    for mine, each in zip(weights, [*saved.variables, *saved.optimizer.variables], strict=True):
        is_saved = mine == np.asarray(each).ravel().tolist() or "seed_generator" in each.path  # Keras does not save it
        assert is_saved, each.path
if strategy is not None and strategy.size > 1:
    seen = communicator.all_gather_object(repr(weights))
    assert all(each == seen[0] for each in seen), "the ranks' weights are not the same"
    assert float(ops.all_reduce(tf.ones([]))) == strategy.size
rank = strategy.rank if strategy is not None else 0
print(json.dumps([ME, rank, history.history, weights, predicted.ravel().tolist()]), flush=True)
