"""Predicts times with the cost model for the cluster of the DDL paper, and for up to 1,024 such hosts.

    python benchmarks/predict.py
    python benchmarks/predict.py --ports 2 --taper 4 --plot scaling.svg

Starts no ranks. For 64 hosts x 4 devices, it prints the predicted time of an all-reduce of 100 MB (the gradients of
ResNet-50) and 350 MB (ResNet-101 with ImageNet-22K's classes) beside the times in arXiv 1708.02188. A second table
compares a flat ring with boxes of 2 and 3 dimensions up to 1,024 hosts.

The sizes and times are the paper's. The machines are IBM Power S822LC with P100 devices. These are their manufacturers'
figures, and assumptions:

    inside a host   two NVLinks between neighbouring devices, 20 GB/s each in one direction
    between hosts   one port of EDR InfiniBand, 100 Gbit/s (--ports 2: both ports of an adapter)
    per message     5 us between the memories of two devices (InfiniBand alone takes 1-2 us)
    racks           16 hosts, with an uplink as fast as all of its hosts together (--taper 4: a quarter of that)

Protocols and jitter cost nothing here, so the times are lower bounds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from _smoke import options_of

from keras_ddl.cost_model import Cluster, Dimension, predict

DEVICES, HOSTS_PER_RACK = 4, 16
NVLINK = 2 * 20e9  # bytes/s
EDR = 100e9 / 8  # bytes/s of one port
LATENCY = 5e-6  # seconds

# MB of gradients -> time that arXiv 1708.02188 reports for 64 hosts x 4 devices.
PAPER = {100: "23 ms", 350: "< 100 ms"}
SCALED = ("ring", "2-d", "3-d", "2-d pipelined", "3-d pipelined")


def cluster(hosts: int, ports: int, taper: float) -> Cluster:
    """Returns racks of the paper's hosts. taper: the speed of a rack's hosts together, relative to its uplink."""
    per_rack = min(hosts, HOSTS_PER_RACK)
    return Cluster(
        (
            Dimension(DEVICES, NVLINK, LATENCY),
            Dimension(per_rack, ports * EDR, LATENCY),
            Dimension(hosts // per_rack, per_rack * ports * EDR / taper, LATENCY),
        )
    )


def print_paper(ports: int, taper: float) -> dict[str, dict[str, float]]:
    """Prints and returns MB -> algorithm -> seconds for the paper's cluster."""
    seconds = {str(mb): predict(cluster(64, ports, taper), mb * 1e6) for mb in PAPER}
    print(f"64 hosts x {DEVICES} devices, {ports} port(s) of 12.5 GB/s per host: milliseconds\n")
    print(f"{'':>20}" + "".join(f"{f'{mb} MB':>12}" for mb in PAPER))
    for name in next(iter(seconds.values())):
        print(f"{name:>20}" + "".join(f"{seconds[str(mb)][name] * 1e3:>12.1f}" for mb in PAPER))
    print(f"{'the paper reports':>20}" + "".join(f"{text:>12}" for text in PAPER.values()))
    return seconds


def print_scaling(ports: int, taper: float, megabytes: int) -> dict[str, dict[str, float]]:
    """Prints and returns hosts -> algorithm -> seconds for 1 to 64 racks."""
    hosts = [16, 32, 64, 128, 256, 512, 1024]
    seconds = {str(n): predict(cluster(n, ports, taper), megabytes * 1e6, SCALED) for n in hosts}
    print(f"\n{megabytes} MB, racks of {HOSTS_PER_RACK} hosts, uplink 1/{taper:g} of their speed: milliseconds\n")
    print(f"{'hosts':>8}{'ranks':>8}" + "".join(f"{name:>16}" for name in SCALED))
    for n, row in seconds.items():
        print(f"{n:>8}{int(n) * DEVICES:>8}" + "".join(f"{row[name] * 1e3:>16.1f}" for name in SCALED))
    return seconds


def plot(file: str, scaling: dict[str, dict[str, float]], title: str) -> None:
    """Draws the scaling table. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 4))
    for name in SCALED:
        axes.plot([int(n) for n in scaling], [row[name] * 1e3 for row in scaling.values()], marker="o", label=name)
    axes.set(xlabel=f"hosts of {DEVICES} devices", ylabel="milliseconds (predicted)", title=title)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend()
    pyplot.savefig(file, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", type=int, default=1, help="ports of 100 Gbit/s per host (default: 1)")
    parser.add_argument(
        "--taper",
        type=float,
        default=1,
        help="factor by which a rack's uplink is slower than all of its hosts together (default: 1)",
    )
    parser.add_argument("--mb", type=int, default=100, help="gradients of the scaling table in MB (default: 100)")
    parser.add_argument("--json", metavar="FILE", help="also write the seconds here")
    parser.add_argument("--plot", metavar="FILE", help="also draw the scaling here (needs matplotlib)")
    options = options_of(parser)
    paper = print_paper(options.ports, options.taper)
    scaling = print_scaling(options.ports, options.taper, options.mb)
    if options.json:
        Path(options.json).write_text(json.dumps({"paper": paper, "scaling": scaling}, indent=1), encoding="utf-8")
    if options.plot:
        plot(options.plot, scaling, f"all-reduce of {options.mb} MB, taper {options.taper:g}")


if __name__ == "__main__":
    main()
