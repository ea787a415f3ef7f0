"""Runs hundreds of thousands of collectives, and checks that memory, open files and threads do not grow.

    keras-ddl run -np 2 python benchmarks/soak.py
    keras-ddl run -np 2 python benchmarks/soak.py --calls 2000000 --no-tensorflow

Runs a cycle of small collectives of every kind (and now and then a large one, one that fails and one from another
thread), and compares resident memory, open file descriptors and threads after a warm-up and at the end. Ends with
status 1 if a rank's memory grew by more than --limit-mib, or if it has more files or threads.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _smoke import options_of

import keras_ddl
from keras_ddl import communicator, errors


def resources() -> dict[str, float]:
    """Returns this process's memory in MiB, and its numbers of file descriptors and threads."""
    time.sleep(0.2)  # a thread that was joined may still be there for a moment
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def disagree() -> None:
    """Runs a collective that fails on every rank, unless there is only one."""
    try:
        communicator.all_reduce_array(np.ones(2 + keras_ddl.rank()), name="soak/disagree")
    except errors.RankMismatchError:
        return
    assert keras_ddl.size() == 1


def in_another_thread() -> None:
    thread = threading.Thread(target=lambda: communicator.all_reduce_array(np.ones(9), name="soak/thread"))
    thread.start()
    thread.join()


def make_calls(tensorflow: bool) -> list[Callable[[], object]]:
    """Returns a cycle of a hundred calls."""
    small, large = np.ones(256, np.float32), np.ones(300_000, np.float32)
    cycle = [
        lambda: communicator.all_reduce_array(small),
        lambda: communicator.all_reduce_array(small, "mean", "soak/named", out=small),
        lambda: communicator.broadcast_array(small, keras_ddl.size() - 1),
        lambda: keras_ddl.all_gather_object(small.shape),
        keras_ddl.barrier,
    ]
    if tensorflow:
        from keras_ddl import ops
        from keras_ddl.compat.tensorflow import tf

        x = tf.ones([8 * keras_ddl.size(), 4])
        step = tf.function(lambda x: (ops.all_reduce(x), ops.reduce_scatter(x), ops.all_gather(x), ops.broadcast(x)))
        cycle += [lambda: step(x), lambda: ops.all_reduce_n([x, x])]
    rare = [lambda: communicator.all_reduce_array(large), disagree, in_another_thread]
    return [cycle[i % len(cycle)] for i in range(100 - len(rare))] + rare


def soak(calls: int, warm_up: int, tensorflow: bool) -> tuple[dict[str, float], dict[str, float], float]:
    """Returns `resources()` after `warm_up` calls and after `calls` more, and the seconds of the latter."""
    cycle = make_calls(tensorflow)
    for number in range(warm_up):
        cycle[number % len(cycle)]()
    before, start = resources(), time.monotonic()
    for number in range(calls):
        cycle[number % len(cycle)]()
    seconds = time.monotonic() - start
    return before, resources(), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300_000)
    parser.add_argument("--warm-up", type=int, default=20_000, help="calls before the first measurement")
    parser.add_argument("--limit-mib", type=float, default=8.0, help="allowed growth of memory per rank")
    parser.add_argument("--no-tensorflow", action="store_true", help="NumPy arrays and objects only")
    options = options_of(parser, calls=100, warm_up=100, limit_mib=100.0)
    keras_ddl.init()
    before, after, seconds = soak(options.calls, options.warm_up, not options.no_tensorflow)
    everyone = keras_ddl.all_gather_object((before, after))
    if keras_ddl.rank() == 0:
        print(f"{options.calls:,} calls after {options.warm_up:,}: {seconds / options.calls * 1e6:.1f} us a call")
        print(f"{'rank':>4}  {'memory, MiB':>24}  {'descriptors':>14}  {'threads':>12}")
        for rank, (old, new) in enumerate(everyone):
            print(
                f"{rank:>4}  {old['memory']:>8.1f} -> {new['memory']:>6.1f} {new['memory'] - old['memory']:+6.2f}"
                f"  {old['descriptors']:>5} -> {new['descriptors']:<5}  {old['threads']:>4} -> {new['threads']:<4}"
            )
    grown = [
        f"rank {rank}: {what}"
        for rank, (old, new) in enumerate(everyone)
        for what, limit in (("memory", options.limit_mib), ("descriptors", 0), ("threads", 0))
        if new[what] > old[what] + limit
    ]
    if grown:
        raise SystemExit(f"soak: grew: {', '.join(grown)}")


if __name__ == "__main__":
    main()
