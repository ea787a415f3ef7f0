"""Compares keras_ddl with Keras's ModelParallel on JAX for a transformer that is split along a model axis.

    python -m venv jax && jax/bin/pip install keras jax      # a separate environment for the peer
    python benchmarks/mesh_peers.py --jax jax/bin/python

Contestants take turns, each in fresh processes on this host, in float32 and from the same weights:

    one     plain Keras on TensorFlow, one process: the bound
    ddl     keras_ddl.Strategy(layout=...) under `keras-ddl run`, a process for each position of the mesh
    jax     keras.distribution.ModelParallel on JAX, one process with a virtual CPU device for each position of the mesh

step = median seconds of a step after the first two; memory = how much training raises peak resident memory beyond the
imported frameworks, for all processes together and for the largest; loss = largest relative difference between a step's
loss and the loss of `one`. JAX compiles the step with XLA, and its devices exchange arrays within one process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _smoke import options_of

HERE = Path(__file__).resolve()
CONTESTANTS = ("one", "ddl", "jax")
# A Megatron-like layout: heads and features.
LAYOUT = {
    ".*attention.*(query|key|value)/kernel": (None, "model", None),
    ".*attention.*(query|key|value)/bias": ("model", None),
    ".*attention.*attention_output/kernel": ("model", None, None),
    ".*up.*/kernel": (None, "model"),
    ".*up.*/bias": ("model",),
    ".*down.*/kernel": ("model", None),
    ".*table/embeddings": ("model", None),
    ".*head/kernel": (None, "model"),
    ".*head/bias": ("model",),
}


def network(options: argparse.Namespace) -> Any:
    import keras

    layers, width = keras.layers, options.width
    x = inputs = keras.Input((options.length,), dtype="int32")
    x = layers.Embedding(options.vocabulary, width, name="table")(x)
    for n in range(options.blocks):
        h = layers.LayerNormalization(name=f"first{n}")(x)
        x += layers.MultiHeadAttention(8, width // 8, name=f"attention{n}")(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(name=f"second{n}")(x)
        x += layers.Dense(width, name=f"down{n}")(layers.Dense(4 * width, activation="gelu", name=f"up{n}")(h))
    return keras.Model(inputs, layers.Dense(options.vocabulary, name="head")(x))


def peak_memory() -> int:
    """Returns the peak of this process's resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(contestant: str, options: argparse.Namespace) -> None:
    """Trains in one process of a contestant, and writes its measurements to the current directory."""
    shape = tuple(options.mesh)
    rank, scope = 0, None
    if contestant == "jax":
        os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={shape[0] * shape[1]}"
    import keras

    if contestant == "jax":
        import jax

        jax.devices()
        mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), keras.distribution.list_devices())
    elif contestant == "ddl":
        import keras_ddl

        mesh = keras_ddl.device_mesh(shape)
    before = peak_memory()
    if contestant != "one":
        layout = keras.distribution.LayoutMap(mesh)
        for key, axes in LAYOUT.items():
            layout[key] = axes
    if contestant == "jax":
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False)
        )
    elif contestant == "ddl":
        strategy = keras_ddl.Strategy(layout=layout)
        rank, scope = strategy.rank, strategy.scope()
        scope.__enter__()
    keras.utils.set_random_seed(0)
    model = network(options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Adam would amplify gradients that consist only of rounding errors.
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=contestant == "jax")
    if contestant == "one":
        if not Path("weights.npz").exists():
            np.savez("weights.npz", *model.get_weights())
    else:
        with np.load("weights.npz") as arrays:
            model.set_weights([arrays[each] for each in arrays.files])
    if scope is not None:
        scope.__exit__(None, None, None)
    rows = np.random.default_rng(1).integers(0, options.vocabulary, (options.steps * options.rows, options.length + 1))
    losses, seconds = [], []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.begun = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            total = float(logs["loss"]) * (batch + 1)  # Keras gives the mean so far
            losses.append(total - sum(losses))
            seconds.append(time.perf_counter() - self.begun)

    fit_options = {"batch_size": options.rows, "shuffle": False, "verbose": 0, "callbacks": [Clock()]}
    model.fit(rows[:, :-1].astype("int32"), rows[:, 1:].astype("int32"), **fit_options)
    seen = {"losses": losses, "seconds": seconds, "memory": peak_memory() - before}
    Path(f"{contestant}_{rank}.json").write_text(json.dumps(seen))


def run(contestant: str, folder: Path, options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """Runs a contestant; returns the measurements of each of its processes."""
    python = options.jax if contestant == "jax" else sys.executable
    command = [python, str(HERE), *arguments, "--in-process", contestant]
    ranks = options.mesh[0] * options.mesh[1] if contestant == "ddl" else 1
    if contestant == "ddl":
        command = [sys.executable, "-m", "keras_ddl.cli", "run", "-np", str(ranks), *command]
    ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        sys.exit(f"{contestant} ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
    return [json.loads((folder / f"{contestant}_{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax", help="a Python with keras and jax (default: without this contestant)")
    parser.add_argument("--mesh", type=int, nargs=2, default=[2, 2], help="data and model ranks (default: 2 2)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a round (default: 12)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch (default: 8)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (default: 128)")
    parser.add_argument("--width", type=int, default=512, help="(default: 512)")
    parser.add_argument("--blocks", type=int, default=4, help="(default: 4)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="(default: 8192)")
    parser.add_argument("--in-process", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = options_of(parser, mesh=[1, 2], rounds=1, steps=3, rows=2, length=8, width=16, blocks=1, vocabulary=64)
    if options.in_process:
        train(options.in_process, options)
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    contestants = [each for each in CONTESTANTS if each != "jax" or options.jax]
    if options.jax:
        options.jax = str(Path(options.jax).absolute())
    rounds: dict[str, list[list[dict[str, Any]]]] = {each: [] for each in contestants}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for each in contestants:
                rounds[each].append(run(each, Path(folder), options, sys.argv[1:]))
    data, model = options.mesh
    print(f"mesh {data} x {model}; {options.blocks} blocks, width {options.width}, vocabulary {options.vocabulary}; ")
    print(
        f"{options.rows} rows of {options.length} tokens; medians of {options.rounds} rounds of {options.steps} steps"
    )
    print(f"{'':6}{'step s':>10}{'of one':>8}{'memory MB':>11}{'largest MB':>12}{'loss':>10}")
    expected, alone = rounds["one"][0][0]["losses"], 1.0
    for each in contestants:
        step = statistics.median(statistics.median(r[0]["seconds"][2:]) for r in rounds[each])
        alone = step if each == "one" else alone
        total = statistics.median(sum(p["memory"] for p in r) for r in rounds[each]) / 1e6
        largest = statistics.median(max(p["memory"] for p in r) for r in rounds[each]) / 1e6
        differs = max(abs(a / b - 1) for r in rounds[each] for a, b in zip(r[0]["losses"], expected))
        print(f"{each:6}{step:10.3f}{step / alone:8.2f}{total:11.0f}{largest:12.0f}{differs:10.1e}")


if __name__ == "__main__":
    main()
