"""Measures the time from the start of a process to the end of its first step, and where that time goes.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --networks resnet --np 4 --rounds 5

One process that trains with plain Keras takes turns with ranks that each train on the same number of rows. Each run is
a new process with one network, so that nothing was traced before, and one TensorFlow thread. The table shows rank 0's
medians over the rounds. `reading`: making the dataset's pipeline and its iterator. `exchanging`: the ranks exchange
settings and initial values. `running`: TensorFlow then prepares the graph and runs it once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
_IMPORTED_AT = time.time()

from _phases import Phases  # noqa: E402
from _smoke import options_of  # noqa: E402

if TYPE_CHECKING:
    import keras

STEPS, FITS = 12, 3
NETWORKS = ("mlp", "cnn", "lstm", "transformer", "resnet")
PHASES = ("imports", "Strategy()", "model", "reading", "tracing", "digest", "cutting", "exchanging", "running", "rest")


def transformer() -> keras.Model:
    from keras import Input, Model, layers

    inputs = Input((64,), dtype="int32")
    x = layers.Embedding(8000, 128)(inputs)
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.MultiHeadAttention(4, 32)(x, x)))
        x = layers.LayerNormalization()(x + layers.Dense(128)(layers.Dense(512, activation="relu")(x)))
    return Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


def measure(name: str, is_plain: bool, result: Path) -> None:
    """Trains in this process; rank 0 writes the seconds of its phases, of a later step, and its memory."""
    phases = Phases()
    started = float(os.environ["FIRST_STEP_STARTED"])
    with phases.phase("imports"):
        import keras
        import tensorflow as tf

        if not is_plain:
            import keras_ddl
            import keras_ddl.strategy
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    scope: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    rank, size = 0, 1
    if not is_plain:
        with phases.phase("Strategy()"):
            strategy = keras_ddl.Strategy()
            scope, rank, size = strategy.scope(), strategy.rank, strategy.size
    _watch(phases, is_plain)

    from keras_ddl.bench.training.networks import NETWORKS as COMMON
    from keras_ddl.bench.training.networks import Network

    network = {**COMMON, "transformer": Network(transformer, 16, (64,), tokens=8000)}[name]
    with phases.phase("model"), scope:
        model = network.make()
        model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    x, y = network.rows(network.batch * size)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).cache().repeat()

    def fit(steps: int) -> float:
        start = time.perf_counter()
        model.fit(data, steps_per_epoch=steps, epochs=1, shuffle=False, verbose=0)
        return time.perf_counter() - start

    with phases.phase("rest"):
        first = fit(1)
    first_phases = dict(phases.seconds)
    ended = time.time()
    step = statistics.median(fit(STEPS) - fit(1) for _ in range(FITS)) / (STEPS - 1)
    if rank == 0:
        import resource

        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        first_phases["start"] = _IMPORTED_AT - started
        measured = {"phases": first_phases, "first": first, "total": ended - started, "step": step, "memory": memory}
        result.write_text(json.dumps(measured))


def _watch(phases: Phases, is_plain: bool) -> None:
    from keras.src.trainers.epoch_iterator import EpochIterator
    from tensorflow.python.data.ops.iterator_ops import OwnedIterator
    from tensorflow.python.eager.polymorphic_function import concrete_function, tracing_compilation

    phases.watch(EpochIterator, "__init__", "reading")
    phases.watch(OwnedIterator, "_create_iterator", "reading")
    phases.watch(tracing_compilation, "trace_function", "tracing")
    phases.watch(concrete_function.ConcreteFunction, "_call_flat", "running")
    if is_plain:
        return
    from keras_ddl import communicator, cut, ops
    from keras_ddl.data import order
    from keras_ddl.strategy.step import cut_step

    phases.watch(cut, "build_step", "cutting")
    phases.watch(cut_step.CutStep, "program_of", "digest")
    phases.watch(cut.Program, "digest", "digest")
    phases.watch(order, "exchange_step_header", "exchanging")
    phases.watch(ops, "broadcast_variables", "exchanging")
    phases.watch(communicator, "all_gather_object", "exchanging")


def run(name: str, np: int, result: Path) -> dict[str, object]:
    """Trains in `np` new ranks (0: in one process with plain Keras), and returns rank 0's measurements."""
    program = [sys.executable, str(Path(__file__).resolve()), "--measure", name, "--result", str(result)]
    if np == 0:
        command = [*program, "--plain"]
    else:
        command = [str(Path(sys.executable).with_name("keras-ddl")), "run", "-np", str(np), *program]
    environment = {**os.environ, "FIRST_STEP_STARTED": repr(time.time())}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: exit status {done.returncode}\n{done.stderr}")
    measured: dict[str, object] = json.loads(result.read_text())
    return measured


def show(name: str, np: int, plain: list[dict[str, object]], ranks: list[dict[str, object]]) -> None:
    def median(runs: list[dict[str, object]], key: str, phase: str = "") -> float:
        values = [each[key].get(phase, 0.0) if phase else each[key] for each in runs]  # type: ignore[attr-defined]
        return float(statistics.median(values))  # type: ignore[type-var]

    print(f"\n{name:<28}{'one process':>12}{f'a rank of {np}':>14}{'ratio':>8}")

    def line(label: str, one: float, other: float, unit: str = "s", scale: float = 1.0) -> None:
        ratio = f"{other / one:8.2f}" if one > 0 else " " * 8
        print(f"{label:<28}{scale * one:10.2f} {unit:<2}{scale * other:11.2f} {unit:<2}{ratio}", flush=True)

    for phase in ("start", *PHASES):
        line(f"  {phase}", median(plain, "phases", phase), median(ranks, "phases", phase))
    line("fit with one step", median(plain, "first"), median(ranks, "first"))
    line("from start to first step", median(plain, "total"), median(ranks, "total"))
    line("a later step", median(plain, "step"), median(ranks, "step"), "ms", 1e3)
    line("memory", median(plain, "memory"), median(ranks, "memory"), "GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: all")
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant (default: %(default)s)")
    parser.add_argument("--measure", choices=NETWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = options_of(parser, networks=["mlp"], rounds=1)
    if options.measure:
        measure(options.measure, options.plain, options.result)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for name in options.networks:
            pairs = [(run(name, 0, result), run(name, options.np, result)) for _ in range(options.rounds)]
            show(name, options.np, [one for one, _ in pairs], [other for _, other in pairs])


if __name__ == "__main__":
    main()
