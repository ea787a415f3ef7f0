"""Words per second and the time of a training step against the number of ranks.

    python -m translation.studies.scaling --model lstm
    python -m translation.studies.scaling --ranks --hosts          # only predicts: takes a second

The rows are

    measured   `keras-ddl run -np N` on this machine. A rank has one core, and the same number of tokens per batch at
               any N, like a device of the original; if there are more ranks than cores, they share cores
    emulated   the same on hosts with one rank each: network namespaces with links of --rate. They need root, and share
               this machine's cores
    predicted  for both: the measured step of a single rank, times the ranks that share a core, plus an all-reduce of
               the gradients by keras_ddl.cost_model; nothing hides the all-reduce, because all cores compute
    published  step times of the original on its machines (original.py): an LSTM, hosts with 4 devices, 100 Gbit/s
               between them. The devices are connected by NVLink; two links of the first generation are specified for
               40 GB/s each way, which --device-link changes
    predicted  for those machines, in three ways, which differ in what they add to the published step of one device:
                 links                the exchange, over links at their specified speed; nothing is fitted
                 links, waiting       the exchange, and the wait for the slowest device: a batch was a number of
                                      sentences, whose lengths differed between devices. The wait is FITTED to 2 and 4
                                      devices of one host; rows of more hosts are predicted
                 slower inside hosts  the exchange, with a link inside hosts that is FITTED to 4 devices
               "error" is the error of the step time.

There is no such wait on this machine, because a batch is a number of tokens, and the ranks share its rows. All
trainings start together, 13 processes by default; then they take turns, one epoch at a time. A time is the median over
the rounds; on a busy machine it means nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_ddl.cost_model import Cluster, Dimension, exchange, shared_memory
from translation.studies import original, rows, trainings
from translation.studies.original import Links
from translation.studies.trainings import Training

PAYLOAD = 0.95  # share of a link's rate; the rest is headers of Ethernet, IP and TCP
UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}


def link_bandwidth(rate: str) -> float:
    """Returns the bytes/s that a link carries, given its rate in tc's spelling: "200mbit", "1gbit"."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return PAYLOAD * float(rate.removesuffix(unit)) * factor
    raise ValueError(f"a rate must be a number with mbit or gbit. Received: {rate!r}")


def copy_bandwidth(nbytes: int) -> float:
    """Returns the bytes/s at which a core copies a buffer of `nbytes`."""
    source, target, seconds = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8), []
    for _ in range(9):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return nbytes / statistics.median(seconds)


def measure(chosen: argparse.Namespace) -> list[rows.Row]:
    """Returns the rows for this machine."""
    with tempfile.TemporaryDirectory() as folder:
        here, emulated, unavailable = trainings.run(Path(folder), chosen)
    if unavailable:
        print(f"Nothing is emulated: {unavailable}")
    nbytes, cores = here[1].gradient_bytes, len(os.sched_getaffinity(0))
    copy = copy_bandwidth(nbytes)
    link = Dimension(1, link_bandwidth(chosen.rate), chosen.emulated_latency)
    found = table(here, emulated, link, cores, copy)
    found[0]["note"] = (
        f"{chosen.model}: {nbytes / 1e6:.1f} MB of gradients; {chosen.tokens} tokens a rank; {cores} cores, "
        f"{copy / 1e9:.1f} GB/s of copying"
    )
    return found


def table(
    here: dict[int, Training], emulated: dict[int, Training], link: Dimension, cores: int, copy: float
) -> list[rows.Row]:
    """Returns a row for each measured and each emulated training, and a row for its prediction.

    Args:
        here: ranks -> training.
        emulated: hosts -> training.
        link: the link of an emulated host.
        copy: bytes/s at which a core copies.
    """
    alone, found = here[1].seconds, []
    links = [(Cluster((shared_memory(ranks, copy, cores),)), "measured", here[ranks]) for ranks in sorted(here)]
    for hosts in sorted(emulated):
        cluster = Cluster((Dimension(1, copy), dataclasses.replace(link, size=hosts)))
        links.append((cluster, "emulated", emulated[hosts]))
    for cluster, how, training in links:
        ranks, hosts = training.ranks, training.ranks if how == "emulated" else 1
        what = "emulated hosts" if how == "emulated" else "here"
        predicted = alone * max(1.0, ranks / cores) + exchange(cluster, training.gradient_bytes)
        for its_how, seconds in ((how, training.seconds), ("predicted", predicted)):
            row = {"how": its_how, "what": what, "ranks": ranks, "hosts": hosts, "step ms": 1e3 * seconds}
            row |= {"times one": ranks * alone / seconds, "words/s": training.words / seconds, "error %": None}
            if its_how == how:
                found.append(row)
            elif ranks > 1:
                found.append(row | {"error %": 100 * (seconds / training.seconds - 1)})
    return found


def draw(figure: Any, found: Sequence[rows.Row]) -> None:
    """Draws words per second on this machine, and the original's step times."""
    groups: dict[tuple[str, str], list[rows.Row]] = {}
    for row in found:
        groups.setdefault((row["how"], row["what"]), []).append(row)
    of_original = [key for key in groups if key[1].startswith("original")]
    here = [key for key in groups if key not in of_original]
    colors = {"emulated hosts": "tab:red", "original: links": "tab:gray", "original: slower inside hosts": "tab:green"}
    panels = [(keys, column) for keys, column in ((here, "words/s"), (of_original, "step ms")) if keys]
    for axes, (keys, column) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for how, what in keys:
            mine = groups[how, what]
            look = rows.LOOKS[how] | ({"color": colors[what]} if how == "predicted" and what in colors else {})
            shown = what.removeprefix("original: ").removeprefix("emulated ")
            label = how if what == "original" else f"{how}: {shown}"
            axes.plot([row["ranks"] for row in mine], [row[column] for row in mine], label=label, **look)
        axes.set(xlabel="devices of the original" if keys is of_original else "ranks", ylabel=column)
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({row["ranks"] for key in keys for row in groups[key]}))
        axes.grid(alpha=0.3)
        axes.legend()


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        parents=[rows.options("scaling")], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument_group("this machine").add_argument
    add("--model", choices=("lstm", "transformer"), default="lstm", help="preset of the model (default: lstm)")
    add("--ranks", type=int, nargs="*", default=[1, 2, 4], metavar="N", help="ranks to measure (default: 1 2 4)")
    add("--hosts", type=int, nargs="*", default=[2, 4], metavar="N", help="hosts to emulate (default: 2 4)")
    add("--rate", default="1gbit", help="rate of an emulated host's link, each way (default: %(default)s)")
    add("--emulated-latency", type=float, default=100e-6, help="ASSUMED seconds per message (default: %(default)g)")
    add("--tokens", type=int, default=1024, help="tokens in a rank's part of a batch (default: %(default)s)")
    add("--pairs", type=int, default=400, help="pairs of phrases per rank and epoch (default: %(default)s)")
    add("--rounds", type=int, default=3, help="measured epochs of each training (default: %(default)s)")
    add = result.add_argument_group("the original's machines").add_argument
    add("--device-link", type=float, default=Links.device, help="bytes/s of a device's link (default: %(default)g)")
    add("--host-link", type=float, default=Links.host, help="bytes/s of a host's link (default: 100 Gbit/s)")
    add("--latency", type=float, default=Links.latency, help="seconds per message (default: %(default)g)")
    add(
        "--overlap",
        type=float,
        default=0.0,
        help="share of the computation during which gradients are exchanged (default: 0, as in the original). "
        "keras_ddl exchanges gradients during the backward pass, a share of some 0.67",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser()
    chosen = rows.parse(options, arguments)
    try:
        link_bandwidth(chosen.rate)
    except ValueError as error:
        options.error(f"--rate: {error}")
    found = []
    if chosen.ranks or chosen.hosts:
        chosen.ranks = sorted({1, *chosen.ranks})  # the predictions need the time of a single rank
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends trainings and the emulated cluster, like Ctrl-C
        found = measure(chosen)
    found += original.table(Links(chosen.device_link, chosen.host_link, chosen.latency), chosen.overlap)
    rows.show(found, chosen, draw)


if __name__ == "__main__":
    main()
