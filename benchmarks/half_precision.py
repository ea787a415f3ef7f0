"""Measures how many elements per second an all_reduce of 16-bit floats reduces, compared with float32.

    keras-ddl run -np 2 python benchmarks/half_precision.py

float16 and bfloat16 have half the bytes but are widened, added in float32 and rounded. Memory allows at most twice the
elements per second of float32; a smaller factor is the cost of conversion. All three dtypes take turns reducing the
same number of elements in place. The program reports medians over the rounds of the slowest rank's time. "memcpy" is
one core that copies the float32 elements between two of its own buffers.
"""

from __future__ import annotations

import argparse
import functools

import ml_dtypes
import numpy as np
from _rounds import interleave, machine
from _smoke import options_of

import keras_ddl
from keras_ddl.communicator import all_reduce_init

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNITS = {"K": 1 << 10, "M": 1 << 20}
# Up to this many elements the buffers stay in the caches, and it takes more calls to get a steady time.
IN_CACHE = 1 << 20


def parse_count(text: str) -> int:
    """'64K' -> 65536 elements."""
    return int(text[:-1]) * UNITS[text[-1].upper()] if text[-1].upper() in UNITS else int(text)


def measure(count: int, rounds: int) -> dict[str, float]:
    """Returns the median seconds per call for each dtype and for a copy."""
    calls = {}
    for name, dtype in DTYPES.items():
        # The mean of equal values is that value, so repeated calls in place do not overflow.
        array = np.full(count, 1.5, dtype)
        calls[name] = all_reduce_init(array, "mean", f"half_precision/{name}/{count}", out=array)
    source = np.ones(count, np.float32)
    calls["memcpy"] = functools.partial(np.copyto, np.zeros_like(source), source)
    repeat = max(2, min(300, (16 << 20) // count))
    return interleave(calls, rounds, repeat, warmup=100 if count <= IN_CACHE else 25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--counts", default="16K,256K,1M,4M,16M,64M", help="elements, K or M (default: 16K,256K,1M,4M,16M,64M)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds per count (default: 9)")
    options = options_of(parser, counts="16K", rounds=1)

    keras_ddl.init()
    rank = keras_ddl.rank()
    if rank == 0:
        print(f"{machine()}; millions of elements per second, and how many times float32's\n")
        print(f"{'elements':>10} {'memcpy':>8} {'float32':>8} {'float16':>8} {'':>6} {'bfloat16':>8} {'':>6}")
    for count in map(parse_count, options.counts.split(",")):
        seconds = measure(count, options.rounds)
        if rank == 0:
            rate = {name: count / value / 1e6 for name, value in seconds.items()}
            print(
                f"{count:>10} {rate['memcpy']:>8.0f} {rate['float32']:>8.0f}"
                f" {rate['float16']:>8.0f} {rate['float16'] / rate['float32']:>5.2f}x"
                f" {rate['bfloat16']:>8.0f} {rate['bfloat16'] / rate['float32']:>5.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
