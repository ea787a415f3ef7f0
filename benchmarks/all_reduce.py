"""all_reduce beside MPI_Allreduce and beside a plain memory copy, from 1 KB to 256 MB.

    keras-ddl run -np 2 python benchmarks/all_reduce.py
    keras-ddl run -np 4 python benchmarks/all_reduce.py --sizes 64K,1M,64M

Every row is measured in interleaved rounds (see _rounds.py). GB/s are bytes of one rank's buffer over time. "of memcpy"
compares with one core copying a buffer of that size while the other ranks do the same: every rank must at least read
its input and write its output once, so nothing can be much above 1 for buffers beyond the caches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from _rounds import interleave, machine
from mpi4py import MPI

import keras_ddl
from keras_ddl.communicator import all_reduce_array, describe

SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """'64K' -> 65536 bytes."""
    return int(text[:-1]) * UNITS[text[-1].upper()] if text[-1].upper() in UNITS else int(text)


def measure(nbytes: int, dtype: np.dtype, rounds: int) -> dict[str, float]:
    """Median seconds of the contestants for one buffer size."""
    count = nbytes // dtype.itemsize
    source = np.random.default_rng(keras_ddl.rank()).normal(size=count).astype(dtype)
    result = np.zeros_like(source)
    copy = np.zeros_like(source)
    contestants = {
        "memcpy": lambda: np.copyto(copy, source),
        "keras_ddl": lambda: all_reduce_array(source, out=result, name="benchmark"),
        "MPI": lambda: MPI.COMM_WORLD.Allreduce(source, copy),
    }
    # About 64 MB per turn, at most 200 calls: long enough for the clock, short enough for many rounds.
    return interleave(contestants, rounds, max(1, min(200, (64 << 20) // nbytes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help=f"buffer sizes per rank in bytes, K, M or G (default: {SIZES})")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per size (default: 15)")
    parser.add_argument("--mode", default=None, help="the topology, as for keras_ddl.init")
    parser.add_argument("--json", default=None, metavar="FILE", help="also write the medians (seconds) here")
    options = parser.parse_args()

    keras_ddl.init(options.mode)
    first = keras_ddl.rank() == 0
    if first:
        print(f"{machine()}; {describe()}\nMPI: {MPI.Get_library_version().splitlines()[0]}\n", flush=True)
        print(f"{'bytes':>10} {'keras_ddl':>12} {'GB/s':>7} {'MPI':>12} {'GB/s':>7} {'vs MPI':>7} {'of memcpy':>10}")
    rows = {}
    for size in map(parse_size, options.sizes.split(",")):
        seconds = measure(size, np.dtype("float32"), options.rounds)
        rows[size] = seconds
        if first:
            ours, mpi = seconds["keras_ddl"], seconds["MPI"]
            print(
                f"{size:>10} {ours * 1e6:>9.1f} us {size / ours / 1e9:>7.2f} {mpi * 1e6:>9.1f} us "
                f"{size / mpi / 1e9:>7.2f} {mpi / ours:>6.2f}x {seconds['memcpy'] / ours:>10.2f}",
                flush=True,
            )
    if first and options.json:
        text = json.dumps({"machine": machine(), "seconds": rows}, indent=1)
        Path(options.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
