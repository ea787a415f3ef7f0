"""Measures a rank's memory and the time of a step under sharding="optimizer" and "weights", with Adam.

    python benchmarks/shard_optimizer.py                    # the MLP of 101 MB, 2 ranks
    python benchmarks/shard_optimizer.py --ranks 4 --network cnn
    python benchmarks/shard_optimizer.py --ranks 4 --layers 21   # an MLP of 353 MB; with Adam's variables 1.06 GB

Contestants take turns in one run. Each turn starts new processes, so that no contestant's memory includes another's:

    independent  every rank trains on its own at the same time, with plain Keras
    whole        every rank trains under keras_ddl.Strategy(), and keeps all of the optimizer's variables
    shards       every rank trains under Strategy(sharding="optimizer")
    weights      every rank trains under Strategy(sharding="weights")

memory = resident memory (VmRSS of /proc/self/status) of the largest rank after the last step; peak = its maximum until
then (VmHWM); both minus the memory before the model was made. variables = bytes of weights and optimizer variables on a
rank; at best, sharding saves the value of `whole` minus a rank's share of it. step = median step of the slowest rank.
All values are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

from _smoke import options_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
CONTESTANTS = ("independent", "whole", "shards", "weights")
WIDTH = 2048  # units of each layer that --layers adds


def memory(field: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def train(contestant: str, network_name: str, steps: int, threads: int, layers: int) -> None:
    """Trains one contestant on this rank; rank 0 prints the measurements as JSON. COLLECTIVE."""
    import keras
    import tensorflow as tf

    import keras_ddl
    from keras_ddl.bench.training.networks import NETWORKS
    from keras_ddl.bench.training.step_times import StepTimes
    from keras_ddl.strategy.shards import gathered_slots

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    warnings.filterwarnings("ignore", "Model .* was made outside the scope")
    strategy = keras_ddl.Strategy(sharding={"shards": "optimizer", "weights": "weights"}.get(contestant))
    network, rank = NETWORKS[network_name], keras_ddl.rank()
    keras_ddl.all_reduce(tf.zeros([1024]))
    before = memory("VmRSS")
    together = contestant != "independent"

    def hidden() -> list[keras.Layer]:
        return [keras.layers.Dense(WIDTH, activation="relu") for _ in range(layers)]

    def compiled() -> keras.Model:
        model = (
            keras.Sequential([keras.Input((WIDTH,)), *hidden(), keras.layers.Dense(10)]) if layers else network.make()
        )
        model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
        return model

    if together:
        with strategy.scope():
            model = compiled()
    else:
        model = compiled()
    x, y = network.rows(network.batch * keras_ddl.size())
    if not together:
        x, y = (each[rank * network.batch : (rank + 1) * network.batch] for each in (x, y))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).cache().repeat()
    watch = StepTimes()
    model.fit(dataset, steps_per_epoch=steps + 2, epochs=1, shuffle=False, verbose=0, callbacks=[watch])
    sharded = gathered_slots.slots_of(model)
    variables = [*model.variables, *model.optimizer.variables]
    whole = [each for each in variables if all(each.value is not slot for slot in sharded)]
    held = [*(each.chunk for each in sharded), *(each.value for each in whole)]
    own = sum(each.shape.num_elements() * each.dtype.size for each in held)
    median = statistics.median(watch.seconds[2:])  # the first steps include tracing
    found = (median, memory("VmRSS") - before, memory("VmHWM") - before, own)
    worst = [max(each) for each in zip(*keras_ddl.all_gather_object(found, name="bench/found"))]
    if rank == 0:
        print("measured", json.dumps(worst), flush=True)


def measure(contestant: str, options: argparse.Namespace) -> list[float]:
    command = [sys.executable, "-m", "keras_ddl.cli", "run", "-np", str(options.ranks), sys.executable, __file__]
    command += ["--contestant", contestant, "--network", options.network, "--steps", str(options.steps)]
    command += ["--threads", str(options.threads), "--layers", str(options.layers)]
    done = subprocess.run(command, capture_output=True, text=True)
    line = next((each for each in done.stdout.splitlines() if each.startswith("measured")), None)
    if line is None:
        sys.exit(f"{contestant} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(line.partition(" ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--network", default="mlp", help="a built-in network of keras-ddl bench train (default: mlp)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round (default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="TensorFlow threads of a rank (default: 1)")
    parser.add_argument(
        "--layers", type=int, default=0, help=f"number of Dense layers of {WIDTH} units, instead of a network"
    )
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS, help="(default: all)")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = options_of(parser, steps=1, rounds=1, layers=1)
    if options.contestant:
        train(options.contestant, options.network, options.steps, options.threads, options.layers)
        return
    rounds: dict[str, list[list[float]]] = {name: [] for name in options.only}
    for _ in range(options.rounds):
        for name, found in rounds.items():
            found.append(measure(name, options))
    medians = {name: [statistics.median(each) for each in zip(*found)] for name, found in rounds.items()}
    network = f"{options.layers} layers" if options.layers else options.network
    print(f"{network} with Adam, {options.ranks} ranks, {options.threads} TensorFlow thread(s) each.\n")
    print(f"{'':>12} {'step':>9} {'memory':>9} {'peak':>9} {'variables':>9}   relative to {options.only[0]}")
    for name, (seconds, resident, peak, own) in medians.items():
        base = medians[options.only[0]]
        megabytes = " ".join(f"{each / 1e6:>6.0f} MB" for each in (resident, peak, own))
        print(
            f"{name:>12} {1e3 * seconds:>6.1f} ms {megabytes}"
            f"   step {seconds / base[0]:.2f}, memory {resident / base[1]:.2f}, peak {peak / base[2]:.2f}"
        )


if __name__ == "__main__":
    main()
