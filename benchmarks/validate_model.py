"""Validates the cost model on an emulated cluster: measures links, predicts times, and measures the times in that run.

    sudo python benchmarks/validate_model.py --hosts 4 --ranks-per-host 2 --rate 200mbit --sizes 5M,25M
    sudo python benchmarks/validate_model.py --hosts 4 --racks 2 --rate 1gbit --rack-rate 500mbit

A link's latency is the time of a step of the engine's flat ring with 1 KiB messages: a small all-reduce minus a
barrier, divided by 2 (P-1) steps. Its bandwidth is measured with 8 MiB per host in messages of 60 KiB, four in flight,
with all ranks sending and receiving at once. The bandwidth of shared memory comes from an all-reduce inside the hosts,
and the start from a barrier. From these values alone the cost model predicts a flat ring (x:1xP), the box of two
dimensions (x:LxH) and, with racks, of three. The exit status is 1 if a prediction is more than 15 % off.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from _emulated_cluster import ClusterUnavailable, EmulatedCluster
from _smoke import lacking, options_of
from cluster import MARK, launch, parse_size

from keras_ddl.cost_model import Cluster, Dimension, engine_algorithms, predict

TOLERANCE = 0.15


def modes(ranks: int, hosts: int, racks: int) -> list[str]:
    """Returns the boxes to compare, in the order of `engine_algorithms`."""
    found = [f"x:1x{ranks * hosts}", f"x:{ranks}x{hosts}"]
    return found if racks == 1 else [*found, f"x:{ranks}x{hosts // racks}x{racks}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument(
        "--rate", default="200mbit", help="rate of each host's link in both directions (default: 200mbit)"
    )
    parser.add_argument("--racks", type=int, default=1, help="racks of equally many hosts (default: 1)")
    parser.add_argument("--rack-rate", help="rate of each rack's uplink in both directions (default: as --rate)")
    parser.add_argument("--sizes", default="5M,25M", help="bytes per rank, decimal K, M or G (default: 5M,25M)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=170, help="seconds after which the ranks are ended")
    parser.add_argument("--json", metavar="FILE", help="also write everything here")
    options = options_of(parser, hosts=2, ranks_per_host=1, sizes="100K", rounds=1)
    settings = {
        "mode": "p",
        "hosts": options.hosts,
        "racks": options.racks,
        "contestants": modes(options.ranks_per_host, options.hosts, options.racks),
        "sizes": [parse_size(word) for word in options.sizes.split(",")],
        "rounds": options.rounds,
        "mark": MARK,
    }
    try:
        with EmulatedCluster(
            options.hosts, options.rate, num_racks=options.racks, rack_rate=options.rack_rate
        ) as emulated:
            settings["counters"] = str(emulated.counters)
            ranks = [options.ranks_per_host] * options.hosts
            result = launch(emulated, ranks, settings, options.timeout, program="_model_ranks.py")
    except ClusterUnavailable as error:
        return lacking("validate_model.py", error)
    units = [options.hosts // options.racks, options.racks][: len(result["links"])]
    inside = Dimension(options.ranks_per_host, result["memory"])
    cluster = Cluster(
        (inside, *(Dimension(n, **link) for n, link in zip(units, result["links"]))), start=result["start"]
    )
    for dim, name in zip(cluster.dims, ("shared memory", "between hosts", "between racks")):
        print(f"{name}: {dim.size} units, {dim.bandwidth / 1e6:.1f} MB/s, {dim.latency * 1e6:.0f} us")
    print(f"start: {cluster.start * 1e6:.0f} us")
    print(f"{'bytes':>11} {'mode':>9} {'predicted':>10} {'measured':>9} {'error':>7}")
    names = dict(zip(settings["contestants"], engine_algorithms(cluster)))
    for row in result["rows"]:
        (row["predicted"],) = predict(cluster, row["bytes"], [names[row["mode"]]]).values()
        row["error"] = row["predicted"] / row["seconds"] - 1
        print(
            f"{row['bytes']:>11} {row['mode']:>9} {row['predicted']:>10.3f} {row['seconds']:>9.3f} "
            f"{row['error'] * 100:>+6.1f}%"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 1 if not options.smoke and any(abs(row["error"]) > TOLERANCE for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
