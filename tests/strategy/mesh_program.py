"""A training of a larger network on a mesh of data x model ranks. Run by test_mesh_programs.py.

mesh_program.py NETWORK FOLDER MODEL_RANKS STEPS

Trains for STEPS steps in all, with checkpoints in FOLDER/saved from which it goes on; with DIE_AT_STEP in the
environment, rank 1 is killed in that step. Leaves in FOLDER:

    <ranks>.npz           outputs of some rows, and the weights
    rows.json             those rows, as a server takes them
    explained_<rank>.txt  what `explain` says
    peak_<rank>.txt       by how many bytes training has raised the peak of resident memory

With TABLE_ROWS and TABLES (of dlrm) nothing is saved.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_ddl

network, folder, model_ranks, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ranks = keras_ddl.init().size
layers = keras.layers
rng = np.random.default_rng(0)
layout_map = keras.distribution.LayoutMap(keras_ddl.device_mesh((ranks // model_ranks, model_ranks)))
ROWS = 8


def tokens(vocabulary, length):
    text = rng.integers(0, vocabulary, (ROWS * steps, length + 1)).astype("int32")
    return text[:, :-1], text[:, 1:]


def like_gpt2(vocabulary=512, width=64, heads=4, length=16, blocks=2):
    layout_map[".*/(query|key|value)/kernel"] = (None, "model", None)
    layout_map[".*/(query|key|value)/bias"] = ("model", None)
    layout_map[".*attention_output/kernel"] = ("model", None, None)
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*up/bias"] = ("model",)
    layout_map[".*down/kernel"] = ("model", None)
    layout_map["(words/embeddings|head/kernel)"] = ("model", None)

    def build():
        text = keras.Input((length,), dtype="int32", name="text")
        x = layers.Embedding(vocabulary, width, name="words")(text)
        x += layers.Embedding(length, width)(keras.ops.arange(length))
        for n in range(blocks):
            h = layers.LayerNormalization()(x)
            x += layers.Dropout(0.1)(layers.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=True))
            h = layers.Dense(4 * width, activation="gelu", name=f"block{n}_up")(layers.LayerNormalization()(x))
            x += layers.Dropout(0.1)(layers.Dense(width, name=f"block{n}_down")(h))
        return keras.Model(text, layers.Dense(vocabulary, name="head")(layers.LayerNormalization()(x)))

    return build, keras.losses.SparseCategoricalCrossentropy(from_logits=True), *tokens(vocabulary, length)


def like_llama(vocabulary=512, width=64, heads=4, groups=2, length=16, blocks=2):
    layout_map[".*/(query|key|value)/kernel"] = (None, "model", None)
    layout_map[".*attention_output/kernel"] = ("model", None, None)
    layout_map[".*(gate|up)/kernel"] = (None, "model")
    layout_map[".*down/kernel"] = ("model", None)
    layout_map["words/embeddings"] = ("model", None)
    layout_map["head/kernel"] = (None, "model")

    def build():
        text = keras.Input((length,), dtype="int32", name="text")
        x = layers.Embedding(vocabulary, width, name="words")(text)
        for n in range(blocks):
            h = layers.RMSNormalization()(x)
            x += layers.GroupQueryAttention(width // heads, heads, groups, use_bias=False)(h, h, use_causal_mask=True)
            h = layers.RMSNormalization()(x)
            gate = layers.Dense(3 * width, activation="silu", use_bias=False, name=f"block{n}_gate")(h)
            up = layers.Dense(3 * width, use_bias=False, name=f"block{n}_up")(h)
            x += layers.Dense(width, use_bias=False, name=f"block{n}_down")(gate * up)
        return keras.Model(text, layers.Dense(vocabulary, use_bias=False, name="head")(layers.RMSNormalization()(x)))

    return build, keras.losses.SparseCategoricalCrossentropy(from_logits=True), *tokens(vocabulary, length)


def resnet50(size=64):
    # In each block the second convolution is cut along its outputs, and the third along its inputs.
    layout_map[".*_2_conv/kernel"] = (None, None, None, "model")
    layout_map[".*_2_conv/bias"] = ("model",)
    layout_map[".*_2_bn/.*"] = ("model",)
    layout_map[".*_3_conv/kernel"] = (None, None, "model", None)
    x = rng.normal(size=(ROWS * steps, size, size, 3)).astype("float32")
    y = rng.integers(0, 10, ROWS * steps).astype("int32")

    def build():
        return keras.applications.ResNet50(weights=None, classes=10, input_shape=(size, size, 3))

    return build, "sparse_categorical_crossentropy", x, y


def like_dlrm(width=16):
    rows, tables = int(os.environ.get("TABLE_ROWS", "10000")), int(os.environ.get("TABLES", "3"))
    layout_map["table./embeddings"] = ("model", None)
    x = rng.normal(size=(ROWS * steps, 13)).astype("float32")
    chosen = rng.integers(0, rows, (ROWS * steps, tables)).astype("int32")
    y = (rng.random(ROWS * steps) < 0.3).astype("float32")

    def build():
        chosen, numbers = keras.Input((tables,), dtype="int32", name="chosen"), keras.Input((13,), name="numbers")
        dense = layers.Dense(width, activation="relu")(layers.Dense(64, activation="relu")(numbers))
        found = [layers.Embedding(rows, width, name=f"table{n}")(chosen[:, n]) for n in range(tables)]
        pairs = [layers.Dot(1)([dense, each]) for each in found]
        top = layers.Dense(64, activation="relu")(layers.Concatenate()([dense, *pairs]))
        return keras.Model([chosen, numbers], layers.Dense(1, activation="sigmoid")(top))

    return build, "binary_crossentropy", [chosen, x], y


class Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        # Iterations count from the first fit on.
        if strategy.rank == 1 and int(self.model.optimizer.iterations.numpy()) == int(os.environ["DIE_AT_STEP"]):
            os.kill(os.getpid(), signal.SIGKILL)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


NETWORKS = {"gpt2": like_gpt2, "llama": like_llama, "resnet50": resnet50, "dlrm": like_dlrm}
if network != "dlrm":  # whose tables are large
    keras.config.set_floatx("float64")
build, loss, x, y = NETWORKS[network]()
strategy, before = keras_ddl.Strategy(layout_map=layout_map), peak()
keras.utils.set_random_seed(7)
with strategy.scope():
    model = build()
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
callbacks = []
if "TABLE_ROWS" not in os.environ:
    callbacks.append(keras_ddl.callbacks.Checkpoint(folder / "saved", resume=True, save_freq=2, save_best=False))
if "DIE_AT_STEP" in os.environ:
    callbacks.append(Dies())
model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=callbacks)
(folder / f"peak_{strategy.rank}.txt").write_text(str(peak() - before))
first = [each[:3] for each in x] if isinstance(x, list) else x[:3]
outputs = model.predict(first, verbose=0)
if ranks > 1:
    (folder / f"explained_{strategy.rank}.txt").write_text(strategy.explain(model))
if "TABLE_ROWS" not in os.environ:  # which would make arrays of gigabytes
    with strategy.whole_model(model):
        if strategy.rank == 0:
            np.savez(folder / f"{ranks}.npz", outputs, *model.get_weights())
            names = [each.name for each in model.inputs]
            rows = {name: each.tolist() for name, each in zip(names, first)} if len(names) > 1 else first.tolist()
            (folder / "rows.json").write_text(json.dumps(rows))
