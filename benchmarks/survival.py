"""Measures how soon the other ranks continue after a rank is killed, and the cost of that ability without failures.

    python benchmarks/survival.py                          # all tables, all networks, 3 ranks
    python benchmarks/survival.py --networks mlp,lstm --kills 20 --part recovery

recovery: each kill is one job of `keras-ddl run -np MIN:MAX`. One rank kills itself with SIGKILL at a random moment of
a random step. The time runs from the kill until rank 0 has ended the first step without that rank; `steps lost` is the
number of optimizer steps missing at the end.

joining: each kill is one job with a spare. The first time runs from the kill until the spare is one of the ranks. The
second is the longest time between the ends of two of rank 0's steps while the spare joins, because training then stops.

overhead: one job. Two models with the same layers and data take turns in rounds of some steps of fit: one may continue
after a loss (`may go on`), one may not, as in a job without -np MIN:MAX (`may not`). This program switches between
the two by private attributes of the Strategy. The overhead of a round is the ratio of the median step times; the table
shows medians over the rounds.

mirrors: like overhead, but with Strategy(sharding="optimizer"), for a small network and a larger one. Each step of the
model that may continue also sends the new shards to their mirrors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _smoke import options_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
NETWORKS = ("mlp", "cnn", "lstm", "transformer")
MIRRORED = ("mlp", "wide")
PARTS = ("recovery", "joining", "overhead", "mirrors")
MARK = "survival.py: "
STEPS_BEFORE = 5  # no rank dies in these first steps, because they are slower
BATCH = 96


def model_of(network: str) -> Any:
    """Returns an uncompiled Keras model from [rows, 32, 16] to [rows, 10]."""
    import keras

    layers = keras.layers
    inputs = keras.Input((32, 16))
    if network == "mlp":
        x = layers.Dropout(0.2)(layers.Dense(512, activation="relu")(layers.Flatten()(inputs)))
        x = layers.BatchNormalization()(layers.Dense(512, activation="relu")(x))
    elif network == "wide":
        x = layers.Flatten()(inputs)
        for _ in range(3):
            x = layers.Dense(2048, activation="relu")(x)
    elif network == "cnn":
        x = layers.BatchNormalization()(layers.Conv1D(64, 3, activation="relu")(inputs))
        x = layers.GlobalAveragePooling1D()(layers.Conv1D(64, 3, activation="relu")(x))
    elif network == "lstm":
        x = layers.LSTM(64)(inputs)
    else:
        x = layers.Dense(64)(inputs)
        for _ in range(2):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x))
            x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, activation="relu")(x)))
        x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


# ---- runs in the ranks


def begin(steps: int, *, sharding: str | None = None) -> tuple[Any, Any, Any]:
    """Returns the Strategy, and data of `steps` batches."""
    import numpy as np
    import tensorflow as tf

    import keras_ddl

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    strategy = keras_ddl.Strategy(seed=0, sharding=sharding)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * steps, 32, 16)).astype(np.float32)
    return strategy, x, rng.integers(10, size=len(x))


def compiled(strategy: Any, network: str) -> Any:
    """Returns a model of the Strategy."""
    import keras

    with strategy.scope():
        model = model_of(network)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def train_and_lose(network: str, victim: int, step: int, part: float) -> None:
    """Trains; rank `victim` dies when the fraction `part` of step `step` is over. Rank 0 prints its measurements."""
    import keras

    strategy, x, y = begin(steps=step + 10)
    me, folder = strategy.rank, Path.cwd()

    def die() -> None:
        (folder / "killed").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    class Watch(keras.callbacks.Callback):
        ended_at: float | None = None
        begun_at, lasted = 0.0, 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.begun_at = time.monotonic()
            if me == victim and batch == step:
                threading.Timer(part * self.lasted, die).start()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.lasted = time.monotonic() - self.begun_at
            if me == victim and batch > step:
                time.sleep(60)  # wait for a late timer
            if self.ended_at is None and strategy.size < size:
                self.ended_at = time.monotonic()

    size, watch = strategy.size, Watch()
    model = compiled(strategy, network)
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[watch])
    if strategy.rank == 0:
        assert watch.ended_at is not None, "no rank was lost"
        seconds = watch.ended_at - float((folder / "killed").read_text())
        lost = len(x) // BATCH - int(model.optimizer.iterations.numpy())
        print(MARK + json.dumps({"seconds": seconds, "lost": lost, "step": watch.lasted}), flush=True)


def train_and_replace(network: str, victim: int) -> None:
    """Trains until a spare has replaced rank `victim`. Rank 0 prints its measurements."""
    import keras

    strategy, x, y = begin(steps=400)
    me, folder, size = strategy.rank, Path.cwd(), strategy.size
    is_spare = (folder / "killed").exists()

    class Watch(keras.callbacks.Callback):
        since_lost: list[float]  # durations of steps
        joined_at, last = 0.0, 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.monotonic()
            if me == victim and not is_spare and batch == STEPS_BEFORE:
                (folder / "killed").write_text(repr(now))
                os.kill(os.getpid(), signal.SIGKILL)
            if batch < STEPS_BEFORE:
                return
            self.since_lost = [*getattr(self, "since_lost", []), now]
            if strategy.size == size and batch > STEPS_BEFORE + 1:
                self.joined_at = self.joined_at or now
                self.last += 1
                self.model.stop_training = self.last >= STEPS_BEFORE
            time.sleep(0.05)  # leaves time to join

    watch = Watch()
    compiled(strategy, network).fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[watch])
    if strategy.rank == 0:
        gaps = [later - one for one, later in zip(watch.since_lost[1:], watch.since_lost[2:])]
        seconds = watch.joined_at - float((folder / "killed").read_text())
        print(MARK + json.dumps({"seconds": seconds, "stop": max(gaps)}), flush=True)


def train_both(network: str, rounds: int, steps: int, *, sharding: str | None) -> None:
    """Trains a model that may continue after a loss and one that may not, in turn. Rank 0 prints medians by round."""
    from keras_ddl.bench.training.step_times import StepTimes
    from keras_ddl.communicator.newcomers import history
    from keras_ddl.strategy.resilience import Resilience

    strategy, x, y = begin(steps, sharding=sharding)
    assert strategy.job.goes_on
    ways = {
        True: (strategy.resilience, strategy.resilience.repeat),
        False: (Resilience(), None),
    }
    models, watch = {may: compiled(strategy, network) for may in ways}, StepTimes()
    medians: list[dict[str, float]] = []
    for number in range(rounds + 1):
        seconds = {}
        for may in (True, False) if number % 2 else (False, True):
            strategy.resilience, recover = ways[may]
            history.recover_by(recover)
            strategy.job.goes_on = may
            models[may].fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[watch])
            seconds["may go on" if may else "may not"] = statistics.median(watch.seconds)
        medians.append(seconds)
    if sharding:
        has_mirrors = {may: "mirror " in strategy.explain(each) for may, each in models.items()}
        assert has_mirrors == {True: True, False: False}, has_mirrors
    if strategy.rank == 0:
        print(MARK + json.dumps(medians[1:]), flush=True)  # the first round includes tracing


# ---- starts the ranks


def launch(ranks: int, *arguments: object, spares: int = 0) -> Any:
    """Runs this program in a job that continues without a lost rank; returns rank 0's output."""
    numbers = ["-np", f"1:{ranks}", "--spares", str(spares)]
    command = [sys.executable, "-m", "keras_ddl.cli", "run", *numbers, sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        options = {"capture_output": True, "text": True, "cwd": folder}
        done = subprocess.run([*command, str(Path(__file__).resolve()), *map(str, arguments)], **options)
    line = next((each for each in done.stdout.splitlines() if MARK in each), None)
    if done.returncode or line is None:
        sys.exit(f"{arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(line.partition(MARK)[2])


def recoveries(network: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns the measurements of each kill."""
    rng, seen = random.Random(f"{options.seed} {network}"), []
    for _ in range(options.kills):
        victim = rng.randrange(options.first_victim, options.ranks)
        step, part = STEPS_BEFORE + rng.randrange(20), round(rng.random(), 3)
        seen.append(launch(options.ranks, "--in-rank", "recovery", network, victim, step, part))
    return seen


def replacements(network: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Returns the measurements of each kill after which a spare joins."""
    rng = random.Random(f"{options.seed} {network}")
    victims = [rng.randrange(max(1, options.first_victim), options.ranks) for _ in range(options.kills)]
    return [launch(options.ranks, "--in-rank", "joining", network, victim, spares=1) for victim in victims]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, help="(default: 3)")
    parser.add_argument(
        "--networks", default=",".join(NETWORKS), help=f"networks among {', '.join(NETWORKS)} (default: all)"
    )
    parser.add_argument("--part", choices=PARTS, help="only this table (default: all)")
    parser.add_argument("--kills", type=int, default=10, help="jobs of each network that lose a rank (default: 10)")
    parser.add_argument("--first-victim", type=int, default=0, help="the lowest rank that may be killed (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed for victims and moments (default: 0)")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each model for the overhead (default: 21)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a turn (default: 30)")
    parser.add_argument("--json", metavar="FILE", help="also write all measurements here")
    parser.add_argument("--in-rank", nargs="+", help=argparse.SUPPRESS)
    options = options_of(parser, networks="mlp", kills=1, rounds=1, steps=2)
    if options.in_rank:
        what, network, *numbers = options.in_rank
        if what == "recovery":
            train_and_lose(network, int(numbers[0]), int(numbers[1]), float(numbers[2]))
        elif what == "joining":
            train_and_replace(network, int(numbers[0]))
        else:
            train_both(network, int(numbers[0]), int(numbers[1]), sharding="optimizer" if what == "mirrors" else None)
        return
    networks = options.networks.split(",")
    if unknown := set(networks) - set(NETWORKS):
        parser.error(f"--networks: choose from {', '.join(NETWORKS)}. Received: {', '.join(sorted(unknown))}")
    result: dict[str, Any] = {"ranks": options.ranks, "cores": len(os.sched_getaffinity(0))}
    print(f"{result['ranks']} ranks on {result['cores']} cores, batches of {BATCH} rows")
    if options.part in (None, "recovery"):
        print(
            f"\n{'':>12} {'kills':>6} {'a step':>10} {'to the next step: median':>26} {'worst':>9} {'steps lost':>11}"
        )
        result["recovery"] = {}
        for network in networks:
            seen = result["recovery"][network] = recoveries(network, options)
            step = statistics.median(each["step"] for each in seen)
            seconds, lost = [each["seconds"] for each in seen], sum(each["lost"] for each in seen)
            median, worst = statistics.median(seconds), max(seconds)
            print(f"{network:>12} {len(seen):>6} {1e3 * step:>7.1f} ms {median:>24.2f} s {worst:>7.2f} s {lost:>11}")
    if options.part in (None, "joining"):
        head = f"{'spares':>6} {'until it has joined: median':>28} {'worst':>9} {'training stops':>16} {'worst':>9}"
        print(f"\n{'':>12} {head}")
        result["joining"] = {}
        for network in networks:
            seen = result["joining"][network] = replacements(network, options)
            took, stops = [each["seconds"] for each in seen], [each["stop"] for each in seen]
            print(
                f"{network:>12} {len(seen):>6} {statistics.median(took):>26.1f} s {max(took):>7.1f} s "
                f"{statistics.median(stops):>14.2f} s {max(stops):>7.2f} s"
            )
    for part, part_networks in (("overhead", networks), ("mirrors", MIRRORED)):
        if options.part not in (None, part):
            continue
        print(f"\n{part:>12} {'may not':>10} {'may go on':>12} {'overhead':>10}   of the middle half of rounds")
        result[part] = {}
        for network in part_networks:
            arguments = part, network, options.rounds, options.steps
            rounds = result[part][network] = launch(options.ranks, "--in-rank", *arguments)
            off, on = (statistics.median(each[way] for each in rounds) for way in ("may not", "may go on"))
            percent = sorted(100 * (each["may go on"] / each["may not"] - 1) for each in rounds)
            low, high = percent[len(percent) // 4], percent[-1 - len(percent) // 4]
            middle = statistics.median(percent)
            print(
                f"{network:>12} {1e3 * off:>7.2f} ms {1e3 * on:>9.2f} ms {middle:>8.1f} %   {low:.1f} to {high:.1f} %"
            )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
