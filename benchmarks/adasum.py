"""Measures the time of adaptive sums, compared with adaptive sums by an all_gather and with a plain sum.

    keras-ddl run -np 2 python benchmarks/adasum.py

Three functions of TensorFlow take turns on one float32 tensor: `all_reduce(..., op="adasum")`; the definition, computed
in full on every rank from the result of an all_gather; and `all_reduce(..., op="sum")`, which moves the same bytes as
the first and adds them once. The program reports medians over the rounds of the slowest rank's time.
"""

from __future__ import annotations

import argparse

from _rounds import interleave, machine
from _smoke import options_of

import keras_ddl
from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ops.adaptive_sum import definition


def measure(nbytes: int, rounds: int) -> dict[str, float]:
    """Returns the median seconds per call."""
    x = tf.random.stateless_normal([nbytes // 4], [keras_ddl.rank(), 1])

    @tf.function
    def gathered():
        parts = ops.all_gather(x[tf.newaxis], name=f"gathered/{nbytes}")
        return definition(tf.unstack(parts, keras_ddl.size()))

    adasum = tf.function(lambda: ops.all_reduce(x, op="adasum", name=f"adasum/{nbytes}"))
    plain = tf.function(lambda: ops.all_reduce(x, name=f"sum/{nbytes}"))
    tf.debugging.assert_near(adasum(), gathered(), rtol=1e-5, atol=1e-5)
    repeat = max(1, (8 << 20) // nbytes)
    return interleave({"adasum": adasum, "all_gather": gathered, "sum": plain}, rounds, repeat, warmup=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", default="1,64", help="sizes of the tensor (default: 1,64)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds per size (default: 9)")
    options = options_of(parser, mebibytes="1", rounds=1)

    keras_ddl.init()
    if keras_ddl.rank() == 0:
        print(f"{machine()}; {keras_ddl.size()} ranks, milliseconds\n")
        print(f"{'MiB':>6} {'adasum':>9} {'all_gather':>11} {'':>7} {'sum':>9}")
    for size in map(int, options.mebibytes.split(",")):
        seconds = measure(size << 20, options.rounds)
        if keras_ddl.rank() == 0:
            ms = {name: value * 1e3 for name, value in seconds.items()}
            print(
                f"{size:>6} {ms['adasum']:>9.2f} {ms['all_gather']:>11.2f}"
                f" {ms['all_gather'] / ms['adasum']:>6.2f}x {ms['sum']:>9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
