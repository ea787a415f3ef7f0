"""Compares all_reduce, or one of its halves, with MPI libraries and a plain memory copy, from 1 KB to 256 MB.

    python benchmarks/all_reduce.py
    python benchmarks/all_reduce.py --collective reduce_scatter --sizes 1K,4K,16K,64K,256K,1M,4M,16M,64M
    python benchmarks/all_reduce.py -np 4 --sizes 1M,4M,16M,64M --peers openmpi,impi-rt

Every contestant has its own ranks, which sleep until their turn; a round measures each contestant once, one after the
other. The program reports medians over the rounds of the slowest rank's time per call, and ratios between contestants
in the same rounds. Times alone mean little, because the place and the speed of a virtual machine's cores change from
minute to minute. All contestants are called from Python with NumPy arrays, keras_ddl through all_reduce_init or a
request prepared in the same way.

Bytes are those of one rank's buffer (the input of a reduce_scatter, the result of an all_gather); GB/s are bytes over
time. "of memcpy" compares with one core copying a buffer of that size while the other ranks do the same: every rank
must at least read its input and write its output once, so nothing can be much above 1 for buffers beyond the caches (a
reduce_scatter has less to write, an all_gather less to read). "of hand-over" compares with the time to pass the cache
lines between the cores (native/bench/hand_over.h): no copy through shared memory can be much above 1. On
the first run the peers are installed into build/mpi-families, and the bound is built in build/hand-over, with CMake and
a compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import _hand_over
from _halves import COLLECTIVES
from _mpi_families import FAMILIES, installed_families
from _smoke import options_of

HERE = Path(__file__).resolve().parent
SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
START_SECONDS, LOOK_SECONDS = 120, 0.2
# Calls before the first round: memory is touched, connections are made, and keras_ddl has tried its schemes.
WARMUP = 100


def parse_size(text: str) -> int:
    """Returns a number of bytes: 65536 for '64K'."""
    return int(text[:-1]) * UNITS[text[-1].upper()] if text[-1].upper() in UNITS else int(text)


class Contestant:
    """The ranks of one library, and a connection to each."""

    def __init__(self, name: str, connections: dict[int, socket.SocketIO], version: str) -> None:
        self.name, self.version = name, version
        self._lines = [connections[rank] for rank in sorted(connections)]

    def prepare(self, collective: str, nbytes: int, dtype: str, itemsize: int, warmup: int) -> None:
        """Allocates buffers and warms up. Raises SystemExit if a result is wrong."""
        order = {"collective": collective, "count": nbytes // itemsize, "dtype": dtype, "warmup": warmup}
        if not all(self._ask(order)):
            raise SystemExit(f"{self.name}: the {collective} of {nbytes} bytes of {dtype} is wrong")

    def seconds(self, what: str, repeat: int, **more: str) -> float:
        """Returns the slowest rank's seconds per call."""
        return max(self._ask({"what": what, "repeat": repeat, **more}))

    def _ask(self, order: dict) -> list:
        for lines in self._lines:
            print(json.dumps(order), file=lines, flush=True)
        answers = [lines.readline() for lines in self._lines]
        if not all(answers):
            raise SystemExit(f"{self.name}: a rank ended; see its output above")
        return [json.loads(answer) for answer in answers]


@contextlib.contextmanager
def contestants(ranks: int, peers: list[str], folder: Path | None, pin: bool):
    """Starts keras_ddl and the peers, and ends them at the end of the block."""
    programs = {"keras_ddl": [sys.executable, "-m", "keras_ddl.cli", "run", "-np", str(ranks), "--", sys.executable]}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(LOOK_SECONDS)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found: dict[str, tuple[dict, str]] = {}
        for name in ["keras_ddl", *peers]:
            script = [str(HERE / "_contestant.py"), address, name, "keras_ddl" if name == "keras_ddl" else "mpi"]
            script.append("1" if pin else "0")
            environment = dict(os.environ)
            if name == "keras_ddl":
                command = [*programs[name], *script]
            else:
                command = FAMILIES[name].command(folder, ranks, script)
                environment.update(FAMILIES[name].environment)
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            stack.callback(finish, process)
            for _ in range(ranks):
                connection = next_rank(server, process, name, time.monotonic() + START_SECONDS)
                stack.callback(connection.close)
                lines = stack.enter_context(connection.makefile("rw"))
                said, rank, version = json.loads(lines.readline())
                found.setdefault(said, ({}, version))[0][rank] = lines
        yield [Contestant(name, *found[name]) for name in found]


def next_rank(server: socket.socket, launcher: subprocess.Popen, name: str, latest: float) -> socket.socket:
    """Returns the next rank's connection. Exits if the launcher ends first, or at the time `latest`."""
    while True:
        has_ended = launcher.poll() is not None  # before the last look: a rank may have connected just before
        try:
            return server.accept()[0]
        except TimeoutError:
            if has_ended:
                raise SystemExit(
                    f"{name}: its ranks ended while they started, with status {launcher.returncode}; see above"
                ) from None
            if time.monotonic() > latest:
                raise SystemExit(f"{name}: a rank did not start in {START_SECONDS} s") from None


def finish(process: subprocess.Popen) -> None:
    """Waits for a launcher whose ranks' connections were closed."""
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def hand_over_bound(library: Path | None, ranks: int, nbytes: int):
    """Yields the arguments with which ranks measure the hand-over; None without the library."""
    if library is None:
        yield None
        return
    shared = _hand_over.shared_file(library, ranks, nbytes)
    try:
        yield {"library": str(library), "shared": shared}
    finally:
        Path(shared).unlink()


def measure(
    everybody: list[Contestant],
    collective: str,
    nbytes: int,
    dtype: str,
    itemsize: int,
    rounds: int,
    bound: dict[str, str] | None,
) -> dict[str, list[float]]:
    """Returns the seconds per call in each round, of each contestant, a copy, and the hand-over if `bound` is given."""
    # About 64 MB per turn, at most 300 calls: long enough for the clock, short enough for many rounds.
    repeat = max(1, min(300, (64 << 20) // nbytes))
    for contestant in everybody:
        contestant.prepare(collective, nbytes, dtype, itemsize, WARMUP if nbytes < 16 << 20 else WARMUP // 4)
    times: dict[str, list[float]] = {"memcpy": [], **{contestant.name: [] for contestant in everybody}}
    if bound is not None:
        times["hand-over"] = []
    for _ in range(rounds):
        times["memcpy"].append(everybody[0].seconds("copy", repeat))
        if bound is not None:
            times["hand-over"].append(everybody[0].seconds("hand_over", repeat, **bound))
        for contestant in everybody:
            times[contestant.name].append(contestant.seconds("collective", repeat))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, metavar="RANKS", help="ranks of each contestant (default: 2)")
    parser.add_argument("--collective", choices=("all_reduce", *COLLECTIVES), default="all_reduce")
    parser.add_argument("--sizes", default=SIZES, help=f"buffer sizes per rank in bytes, K, M or G (default: {SIZES})")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="float32, float64, int32, ...; float16 and bfloat16, which MPI lacks, with --peers '' (default: float32)",
    )
    parser.add_argument(
        "--peers", default=",".join(FAMILIES), help=f"peers among {', '.join(FAMILIES)}, or '' for none (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds per size (default: 11)")
    parser.add_argument("--families", type=Path, default=HERE.parent / "build" / "mpi-families", metavar="DIR")
    parser.add_argument("--json", default=None, metavar="FILE", help="also write all rounds' seconds here")
    options = options_of(parser, sizes="1K", rounds=1, peers=",".join(installed_families()), families=None)
    peers = [peer for peer in options.peers.split(",") if peer]
    if unknown := set(peers) - set(FAMILIES):
        parser.error(f"--peers: one of {', '.join(FAMILIES)}. Received: {', '.join(sorted(unknown))}")

    itemsize = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1}.get(options.dtype, 4)
    rows: dict[int, dict[str, list[float]]] = {}
    # The bound only applies to an all_reduce.
    bounded = options.np > 1 and options.collective == "all_reduce"
    library = _hand_over.build(HERE.parent / "build" / "hand-over") if bounded else None
    pin = options.np <= len(os.sched_getaffinity(0))
    with contestants(options.np, peers, options.families and options.families.resolve(), pin) as everybody:
        pinned = "one core each" if pin else f"on {len(os.sched_getaffinity(0))} cores"
        processor = platform.processor() or platform.machine()
        print(f"{options.collective}: {processor}, {os.cpu_count()} cores; {options.np} ranks, {pinned}")
        for contestant in everybody:
            print(f"{contestant.name}: {contestant.version}")
        peer_heads = "".join(f"{peer + ' us':>13} {'GB/s':>6}" for peer in peers)
        ratios = f"{'vs best':>8} {'of memcpy':>10} {'of hand-over':>13}"
        print(f"\n{'bytes':>10} {'keras_ddl us':>13} {'GB/s':>6}{peer_heads} {ratios}")
        for size in map(parse_size, options.sizes.split(",")):
            with hand_over_bound(library, options.np, size) as bound:
                what = options.collective, size, options.dtype, itemsize
                rows[size] = measure(everybody, *what, options.rounds, bound)
            median = {name: statistics.median(seconds) for name, seconds in rows[size].items()}
            cells = "".join(
                f"{median[name] * 1e6:>13.1f} {size / median[name] / 1e9:>6.2f}" for name in ["keras_ddl", *peers]
            )
            ours = median["keras_ddl"]
            ratio = f"{min(median[peer] for peer in peers) / ours:.2f}x" if peers else "-"
            bound_ratio = f"{median['hand-over'] / ours:.2f}" if "hand-over" in median else "-"
            print(f"{size:>10} {cells} {ratio:>8} {median['memcpy'] / ours:>10.2f} {bound_ratio:>13}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"ranks": options.np, "seconds": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
