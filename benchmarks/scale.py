"""Simulates the control plane at 256, 1,024 and 4,096 ranks: the work of rank 0 for a step, and the time it adds.

    python benchmarks/scale.py

Runs the real coordinator, the agreement on planned collectives and the rings between hosts in one process, with
transports in memory (native/bench/scale/, built on the first run). It *measures* the processor time of this code on
this machine, and *counts* its messages, their bytes, and the longest chain of messages that wait for each other. The
time of a message is *assumed*, by options: --message-us at the rank that sends or receives it, --latency-us on the way.
These and the model of observe/cost_model/ give the *predictions*: gradients of 100 and 350 MB on the cluster of the
PowerAI DDL paper (arXiv 1708.02188), 64 hosts x 4 devices, next to the paper's figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from _smoke import options_of
from predict import DEVICES, PAPER, cluster

from keras_ddl.cost_model import predict

ROOT = Path(__file__).resolve().parent.parent
RANKS = (256, 1024, 4096)
ENGINE = "2-d pipelined"
# What a step does, by who decides: key of the program's answer -> words.
WAYS = {
    "first": "coordinator, in full",
    "repeated": "coordinator, by id",
    "planned": "by plan",
}
# The same of one collective, that in which ranks tell one another their rows, once a step.
ROWS = {"rows_first": "coordinator, in full", "rows": "coordinator, by id", "planned_rows": "by plan"}


def build(folder: Path) -> Path:
    """Builds the program in `folder`; returns its path. Needs CMake and a C++ compiler."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise SystemExit("scale: CMake was not found. Install it (pip install cmake).")
    options = [f"-DKERAS_DDL_{name}" for name in ("MPI=OFF", "TF=OFF", "BENCH=ON")]
    configure = [cmake, "-S", str(ROOT / "native"), "-B", str(folder), *options]
    for step in (configure, [cmake, "--build", str(folder), "--target", "keras_ddl_scale", "--parallel", "2"]):
        done = subprocess.run(step, capture_output=True, text=True, env={**os.environ, "PATH": path})
        if done.returncode:
            raise SystemExit(f"scale: {' '.join(step)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return folder / "bench" / "scale"


def simulate(program: Path, ranks: Sequence[int], buckets: int, repeat: int) -> list[dict]:
    """Returns the program's counts at each number of ranks.

    Processor times are the median of `repeat` runs, in which the numbers of ranks take turns.
    """
    runs: list[list[dict]] = [[] for _ in ranks]
    for _ in range(repeat):
        for size, results in zip(ranks, runs):
            command = [str(program), str(size), str(DEVICES), str(buckets)]
            results.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    for first, *others in runs:
        for way in (*WAYS, *ROWS):
            times = [first[way]["cpu_seconds"], *(run[way]["cpu_seconds"] for run in others)]
            first[way]["cpu_seconds"] = statistics.median(times)
    return [results[0] for results in runs]


def rank_0_seconds(found: dict, message_s: float) -> float:
    """Returns the seconds for which the control plane of a step keeps rank 0 busy: its code, and its messages."""
    return found["cpu_seconds"] + found["messages"] * message_s


def added_seconds(found: dict, buckets: int, latency_s: float, message_s: float) -> float:
    """Returns the seconds that the control plane adds to a step if nothing overlaps: latency, and work on the way.

    With a coordinator this is rank 0's work; with a plan, each message of the chain adds its own work.
    """
    if "most_messages" not in found:
        return buckets * found["chain"] * latency_s + rank_0_seconds(found, message_s)
    return found["chain"] * (latency_s + message_s) + found["cpu_seconds"]


def print_rank_0(
    results: list[dict], ways: dict[str, str], collectives: int, latency_s: float, message_s: float
) -> None:
    columns = f"{'messages':>10}{'bytes':>12}{'CPU ms':>9}{'chain':>7}{'busy ms':>9}{'adds ms':>9}"
    print(f"{'ranks':>7}  {'decided':<22}{columns}")
    for found in results:
        for way, words in ways.items():
            each = found[way]
            busy = rank_0_seconds(each, message_s) * 1e3
            added = added_seconds(each, collectives, latency_s, message_s) * 1e3
            print(
                f"{found['ranks']:>7}  {words:<22}{each['messages']:>10,}{each['bytes']:>12,}"
                f"{each['cpu_seconds'] * 1e3:>9.2f}{each['chain']:>7}{busy:>9.2f}{added:>9.2f}"
            )


def print_rings(results: list[dict]) -> None:
    print("\nlongest chain of messages of one block between hosts: ", end="")
    print(
        ", ".join(
            f"{found['hosts']} hosts {found['ring']['chain']} (racks of 16: {found['racks']['chain']})"
            for found in results
        )
    )


def print_paper(found: dict, buckets: int, latency_s: float, message_s: float) -> dict[int, dict[str, float]]:
    """Prints and returns {MB: {way: seconds}} for the paper's cluster, which `found` is of."""
    seconds: dict[int, dict[str, float]] = {}
    print(f"\n64 hosts x {DEVICES} devices, {buckets} buckets a step: milliseconds, predicted\n")
    print(f"{'':>32}" + "".join(f"{f'{mb} MB':>12}" for mb in PAPER))
    for mb in PAPER:
        data = buckets * predict(cluster(64, 1, 1), mb * 1e6 / buckets, [ENGINE])[ENGINE]
        seconds[mb] = {"data alone": data}
        for way, words in WAYS.items():
            seconds[mb][words] = data + added_seconds(found[way], buckets, latency_s, message_s)
    for name in next(iter(seconds.values())):
        print(f"{name:>32}" + "".join(f"{seconds[mb][name] * 1e3:>12.1f}" for mb in PAPER))
    print(f"{'the paper reports':>32}" + "".join(f"{text:>12}" for text in PAPER.values()))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=4, help="collectives of a step (default: 4)")
    parser.add_argument(
        "--most-ranks", type=int, default=RANKS[-1], help=f"largest number of ranks, among {RANKS} (%(default)s)"
    )
    parser.add_argument("--message-us", type=float, default=1.0, help="work of a message at one end (1)")
    parser.add_argument("--latency-us", type=float, default=5.0, help="a message's time on the way (5, as predict.py)")
    parser.add_argument("--repeat", type=int, default=9, help="runs; the median of their times is reported (9)")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "scale", help="folder of the program")
    parser.add_argument("--json", type=Path, help="also write everything here")
    options = options_of(parser, most_ranks=256, repeat=1)
    program = build(options.build)
    results = simulate(program, [each for each in RANKS if each <= options.most_ranks], options.buckets, options.repeat)
    latency_s, message_s = options.latency_us * 1e-6, options.message_us * 1e-6
    print(f"assumed: {options.message_us:g} us of work per message at either end, {options.latency_us:g} us on the way")
    print(f"\nrank 0, one step of {options.buckets} collectives, {DEVICES} ranks per host\n")
    print_rank_0(results, WAYS, options.buckets, latency_s, message_s)
    print("\nrank 0, the exchange of rows\n")
    print_rank_0(results, ROWS, 1, latency_s, message_s)
    print_rings(results)
    paper = print_paper(results[0], options.buckets, latency_s, message_s)
    if options.json:
        options.json.write_text(json.dumps({"simulated": results, "paper": paper}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
