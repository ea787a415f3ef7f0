"""Trains a network of wide layers with Adam and reports the memory of the process. Run by test_mesh_memory.py.

mesh_memory.py WIDTH BLOCKS [--alone] [--limit MB]

--alone: plain Keras in one process. --limit: MB of private memory allowed beyond the imported runtime (RLIMIT_DATA).
Rank 0 prints MB as JSON, each the maximum over ranks: size of its weights and slots, resident memory of the imported
runtime, and the peak resident memory above it.
"""

import argparse
import contextlib
import json
import os
import resource
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_ddl
from keras_ddl.strategy.shards import sharded_slots


def memory(field):
    """Returns a field of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(each for each in lines if each.startswith(field)).split()[1]) * 1024 / 1e6


parser = argparse.ArgumentParser()
parser.add_argument("width", type=int)
parser.add_argument("blocks", type=int)
parser.add_argument("--alone", action="store_true")
parser.add_argument("--limit", type=float)
options = parser.parse_args()

scope, rank = contextlib.nullcontext(), 0
if not options.alone:
    layout = keras.distribution.LayoutMap(keras_ddl.device_mesh((1, keras_ddl.init().size)))
    layout[".*up/kernel"] = (None, "model")
    layout[".*down/kernel"] = ("model", None)
    layout[".*up/bias"] = ("model",)
    strategy = keras_ddl.Strategy(layout=layout)
    scope, rank = strategy.scope(), strategy.rank
keras.ops.matmul(np.ones((64, 64), "float32"), np.ones((64, 64), "float32"))
runtime, data = memory("VmRSS"), memory("VmData")
if options.limit is not None:
    limit = int((data + options.limit) * 1e6)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

with scope:
    inputs = x = keras.Input((options.width,))
    for n in range(options.blocks):
        wide = keras.layers.Dense(4 * options.width, activation="relu", name=f"block{n}up")(x)
        x = x + keras.layers.Dense(options.width, name=f"block{n}down")(wide)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.Adam(1e-4), "mse")
rows = np.random.default_rng(0).normal(size=(64, options.width)).astype("float32")
history = model.fit(rows, rows, batch_size=32, epochs=2, verbose=0)

parts = [one for each in [*model.variables, *model.optimizer.variables] for one in sharded_slots.local_variables(each)]
share = sum(np.prod(each.shape) * tf.as_dtype(each.dtype).size for each in parts) / 1e6
tensors = tf.config.experimental.get_memory_info("CPU:0")["peak"] / 1e6  # held by TensorFlow's allocator
measured = {"share": share, "runtime": runtime, "peak": memory("VmHWM") - runtime, "data": memory("VmData") - data}
measured["tensors"] = tensors
if not options.alone:
    worst = [max(each) for each in zip(*keras_ddl.all_gather_object(list(measured.values()), name="measured"))]
    measured = dict(zip(measured, worst))
if rank == 0:
    print("measured", json.dumps({**measured, "loss": history.history["loss"]}), flush=True)
