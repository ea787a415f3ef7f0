"""A `strategy.function` loop that survives killed ranks. Run by test_survival_of_loops.py.

surviving_loop.py KIND DATA [WHERE RANK:WHEN ...]
    KIND: steps, shards, gan, method, open, two, or behind; or one that ends the job: iterator, drawn, rows, collective
    DATA: ignored
    WHERE: step, between, never

It prints [initial rank, final rank, losses, weights, predictions] as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

import keras_ddl
from keras_ddl import communicator
from keras_ddl.strategy import function
from keras_ddl.strategy.shards import sharded_slots

KIND = sys.argv[1]
WHERE = sys.argv[3] if len(sys.argv) > 3 else "never"
KILLED = {int(rank): int(when) for rank, _, when in (each.partition(":") for each in sys.argv[4:])}
STEPS, BATCH = 14, 10

keras.config.set_floatx("float64")
tf.config.threading.set_intra_op_parallelism_threads(1)
os.environ["KERAS_DDL_SHARD_FROM_ELEMENTS"] = "10"
strategy = keras_ddl.Strategy(seed=3, sharding="optimizer" if "shards" in KIND else None)
keras.utils.set_random_seed(3)
ME = strategy.rank
rng = np.random.default_rng(0)
x = rng.normal(size=(STEPS * BATCH + 7, 8))
layers = keras.layers


def kill(where: str, when: int) -> None:
    if where == WHERE and KILLED.get(ME) == when:
        os.kill(os.getpid(), signal.SIGKILL)


def network(outputs: int) -> keras.Model:
    dropout = layers.Dropout(0.2, seed=4)
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, "relu"), layers.BatchNormalization(), dropout, layers.Dense(outputs)]
    )


model, critic = network(8), network(1)
optimizer, second = keras.optimizers.AdamW(0.01, global_clipnorm=1.0), keras.optimizers.SGD(0.01, momentum=0.9)
mean = keras.metrics.Mean()


def update(model: keras.Model, optimizer: keras.optimizers.Optimizer, loss_of) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of()
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def train_step(x, y):
    if KIND == "drawn":
        x += 0.01 * tf.random.normal(tf.shape(x), seed=1, dtype=x.dtype)
    loss = update(model, optimizer, lambda: tf.reduce_mean(tf.square(y - model(x, training=True))))
    if KIND == "gan":  # the second update reads the first one's writes
        loss += update(
            critic,
            second,
            lambda: tf.reduce_mean(critic(tf.stop_gradient(model(x, training=True)), training=True) ** 2),
        )
    mean.update_state(loss)
    return loss, mean.result()


class Trainer:
    def step(self, x, y):
        return train_step(x, y)


Trainer.step = strategy.function(Trainer.step)
step = {
    "method": Trainer().step,
    "iterator": strategy.function(lambda iterator: train_step(*next(iterator))),
    "rows": strategy.function(train_step, batches="rank"),
    "open": strategy.function(train_step, reduce_retracing=True),
}.get(KIND) or strategy.function(train_step)
validate = strategy.function(lambda x: tf.reduce_sum(model(x) ** 2))
iterator = iter(tf.data.Dataset.from_tensor_slices((x, np.tanh(x))).batch(BATCH).repeat())

if "behind" in KIND and ME == 2:
    # As if rank 1 was lost while step 5 was committed: rank 0 had committed it, but this rank had not.
    run, calls = function._Traced.__call__, itertools.count()

    def falls_behind(traced, tensors):
        if next(calls) != 5:
            return run(traced, tensors)
        stored = [each for some in traced.variables for each in sharded_slots.local_variables(some)]
        before = [each.read_value() for each in stored]
        run(traced, tensors)
        for variable, value in zip(stored, before):
            variable.assign(value)
        staged = step.cut_step._snapshots[-1]._staged._flag
        if staged is not None:
            tf.raw_ops.AssignVariableOp(resource=staged, value=tf.constant(True))
        return communicator.barrier("not_of_all")  # fails as soon as rank 1 is lost

    function._Traced.__call__ = falls_behind

losses = []
for number in range(STEPS):
    kill("between", number)
    threading.Timer(0.01 * rng.random(), kill, ["step", number]).start()
    rows = slice(number * BATCH, (number + 1) * BATCH + (number % 3 if KIND == "open" else 0))
    if KIND == "iterator":
        loss, average = step(iterator)
    else:
        loss, average = step(x[rows], np.tanh(x[rows]))
    losses.append([float(loss), float(average)])
    if KIND == "two":
        losses.append([float(validate(x[:12]))])
    if KIND == "collective":
        kill("collective", number)
        communicator.all_gather_object(number)
with strategy.whole_optimizer(optimizer):
    variables = [*model.variables, *critic.variables, *optimizer.variables, *second.variables, *mean.variables]
    weights = [np.asarray(each).ravel().tolist() for each in variables]
if strategy.size > 1:
    seen = communicator.all_gather_object(repr(weights))
    assert all(each == seen[0] for each in seen), "the ranks' weights are not the same"
    assert "when a rank is lost: the others repeat this step" in step.explain()
print(json.dumps([ME, strategy.rank, {"loss": sum(losses, [])}, weights, float(validate(x[:9]))]), flush=True)
