"""Measures collectives on an emulated cluster: builds hosts and links, measures, checks the bytes sent, removes it all.

    sudo python benchmarks/cluster.py --hosts 4 --ranks-per-host 2 --rate 200mbit --sizes 25M
    sudo python benchmarks/cluster.py --hosts 3 --ranks-per-host 3,2,1 --rate 1gbit
    sudo python benchmarks/cluster.py --rate 200mbit --sizes 100M --contestants keras_ddl,bfloat16,float16
    sudo python benchmarks/cluster.py --rate 200mbit --collective reduce_scatter --contestants keras_ddl,mpi
    sudo python benchmarks/cluster.py --hosts 4 --racks 2 --rack-rate 200mbit --contestants keras_ddl,x:1x8,tcp,mpi

N: bytes of the buffer, H: hosts, R: racks. Whatever the algorithm, a host must send 2 (H-1)/H N bytes and a rack
2 (R-1)/R N (each is one node of an all-reduce among H or R nodes), so the bound is the larger of 2 (H-1)/H N / rate and
2 (R-1)/R N / rack rate. A reduce-scatter and an all-gather of N bytes must send half of that; "bfloat16" and "float16",
which are keras_ddl with compression, send half of it, but are compared with the same bound. Headers of Ethernet, IP and
TCP leave 95 % of a rate to the payload. The contestant "tcp" measures in the same run what the links carry: it streams
the same bytes through plain sockets (_tcp_streams.py). Each round runs every contestant once; the program prints
medians of the slowest rank's time.

The run fails if a sum is wrong, or if the counters of the links show that keras_ddl sent more than 8 % above or 3 %
below those bytes. Then data bypassed the emulated network, or the algorithm sends more than necessary. It also fails if
the ranks are in several sessions, because the kernel may then let some of them wait for seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from _emulated_cluster import ClusterUnavailable, EmulatedCluster
from _smoke import lacking, options_of

MARK = "CLUSTER-RESULT "
UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}
RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLACK = (0.97, 1.08)
SHARE_OF_BYTES = {"keras_ddl": 1, "bfloat16": 0.5, "float16": 0.5}  # what each sends, as a share of the expected bytes


def parse_size(text: str) -> int:
    """'25M' -> 25,000,000 bytes, as link rates are decimal too; rounded down to whole float32."""
    value = int(float(text[:-1]) * UNITS[text[-1].upper()]) if text[-1].upper() in UNITS else int(text)
    return value // 4 * 4


def parse_rate(text: str) -> float:
    """Returns bytes per second: 25,000,000 for '200mbit'."""
    for unit, bits in RATES.items():
        if text.endswith(unit):
            return float(text[: -len(unit)]) * bits / 8
    raise argparse.ArgumentTypeError(f"a rate is a number and kbit, mbit or gbit. Received: {text!r}")


def parse_ranks(text: str, hosts: int) -> list[int]:
    """Returns the number of ranks of each host: '2' means 2 on every host, '3,2,1' names one number for each."""
    numbers = [int(word) for word in text.split(",")]
    numbers = numbers * hosts if len(numbers) == 1 else numbers
    if len(numbers) != hosts or min(numbers) < 1:
        raise SystemExit(f"--ranks-per-host: one number, or one for each of {hosts} hosts. Received: {text}.")
    return numbers


def launch(
    cluster: EmulatedCluster,
    ranks: list[int],
    settings: dict,
    timeout: float,
    program: str = "_cluster_ranks.py",
    mark: str = MARK,
) -> Any:
    """Runs `program`, a file next to this one, on the cluster; returns rank 0's output after `mark`."""
    slots = ",".join(f"{host}:{n}" for host, n in zip(cluster.hosts, ranks))
    path = Path(__file__).with_name(program)
    # Looks next to this Python first, because the PATH may lack its folder.
    mpirun = shutil.which(
        "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    words = [mpirun or "mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]
    # All "hosts" share this machine's cores, so MPI must not spin on a core that another rank needs.
    words += ["--mca", "mpi_yield_when_idle", "1"]
    # Otherwise each of mpirun's daemons makes a session. Linux shares a core among sessions first (sessions.py), so
    # threads of one session may wait for seconds while a thread of another polls. Real hosts do not share cores.
    words += ["--leave-session-attached"]
    words += ["--prtemca", "plm_ssh_agent", str(cluster.agent), "--host", slots, "-np", str(sum(ranks))]
    words += [sys.executable, str(path), json.dumps(settings)]
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", PYTHONSAFEPATH="")
    process = subprocess.Popen(
        cluster.command(cluster.hosts[0], [quoted]),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # only this process gets Ctrl-C; the end of the `with` block ends the ranks
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    found = [line for line in output.splitlines() if mark in line]
    # mpirun may end with 0 although a host was lost, so only the program's own output counts.
    if not found:
        raise SystemExit(f"the ranks did not finish (mpirun's status: {process.returncode}):\n{output}")
    return json.loads(found[0].split(mark, 1)[1])


def expected_bytes(nbytes: int, hosts: int, racks: int, collective: str = "all_reduce") -> dict[str, float]:
    """Returns the bytes that each host ("h") and each rack ("r") must send."""
    halves = 2 if collective == "all_reduce" else 1
    return {"h": halves * (hosts - 1) / hosts * nbytes, "r": halves * (racks - 1) / racks * nbytes}


def judge(row: dict, options: argparse.Namespace) -> list[str]:
    """Adds ratios to `row`; returns the problems that they show."""
    expected = expected_bytes(row["bytes"], options.hosts, options.racks, options.collective)
    rates = {"h": parse_rate(options.rate), "r": parse_rate(options.rack_rate or options.rate)}
    row["bound_seconds"] = max(expected[kind] / rates[kind] for kind in expected)
    row["of_bound"] = row["seconds"] / row["bound_seconds"]
    row["sent_of_expected"] = {
        link: total / expected[link[0]] for link, total in row["sent"].items() if expected[link[0]] > 0
    }
    wrong = [] if row["right"] else [f"{row['contestant']}, {row['bytes']} bytes: wrong sums"]
    # For small buffers, headers and the launcher's own messages are most of the bytes.
    part = SHARE_OF_BYTES.get(row["contestant"])
    if part is not None and row["bytes"] >= 10**6:
        for link, ratio in row["sent_of_expected"].items():
            if not SLACK[0] * part <= ratio <= SLACK[1] * part:
                wrong.append(
                    f"{row['contestant']}, {row['bytes']} bytes: {link} sent {ratio:.3f} of what must be sent; "
                    f"must be {SLACK[0] * part} to {SLACK[1] * part}"
                )
    return wrong


def report(result: dict, options: argparse.Namespace) -> None:
    print(f"{result['machine']}; {result['describe']}")
    print(
        f"{options.collective} on {options.hosts} hosts of {options.ranks_per_host} ranks at {options.rate}"
        + (f", {options.racks} racks at {options.rack_rate or options.rate}" if options.racks > 1 else "")
        + f"; medians of {options.rounds}"
    )
    print(
        f"{'bytes':>11} {'contestant':>14} {'seconds':>9} {'of bound':>9} {'of tcp':>7} {'vs mpi':>7} {'CPU s':>7}  "
        "sent / expected"
    )
    seconds = {(row["bytes"], row["contestant"]): row["seconds"] for row in result["rows"]}
    for row in result["rows"]:
        tcp, mpi = (seconds.get((row["bytes"], peer)) for peer in ("tcp", "mpi"))
        times_tcp = f"{row['seconds'] / tcp:.3f}" if tcp else "-"
        versus = f"{mpi / row['seconds']:.2f}x" if mpi else "-"
        by_kind: dict[str, list[float]] = {}
        for link, ratio in row["sent_of_expected"].items():
            by_kind.setdefault({"h": "host", "r": "rack"}[link[0]], []).append(ratio)
        sent = ", ".join(f"{kind} {min(values):.3f}-{max(values):.3f}" for kind, values in by_kind.items())
        print(
            f"{row['bytes']:>11} {row['contestant']:>14} {row['seconds']:>9.3f} {row['of_bound']:>9.3f} {times_tcp:>7} "
            f"{versus:>7} {row['cpu_seconds']:>7.2f}  {sent}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", default="2", help="one number, or one for each host: 3,2,1")
    parser.add_argument("--rate", default="1gbit", help="rate of each host's link in both directions (default: 1gbit)")
    parser.add_argument("--racks", type=int, default=1, help="racks of equally many hosts (default: 1)")
    parser.add_argument("--rack-rate", help="rate of each rack's uplink in both directions (default: as --rate)")
    parser.add_argument("--sizes", default="25M", help="bytes per rank, decimal K, M or G (default: 25M)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", default="p", help="mode of keras_ddl (default: 'p'; hosts know their racks)")
    parser.add_argument(
        "--contestants",
        default="keras_ddl,tcp,mpi",
        help="among keras_ddl, bfloat16, float16, tcp, mpi, and modes such as x:1x8 (default: keras_ddl,tcp,mpi)",
    )
    parser.add_argument("--collective", choices=("all_reduce", "reduce_scatter", "all_gather"), default="all_reduce")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which the ranks are ended")
    parser.add_argument("--json", metavar="FILE", help="also write everything here")
    options = options_of(parser, hosts=2, ranks_per_host="1", sizes="100K", rounds=1)
    if options.collective != "all_reduce" and {"tcp", "bfloat16", "float16"} & set(options.contestants.split(",")):
        raise SystemExit(f"--contestants: keras_ddl, mpi and modes for --collective {options.collective}.")
    ranks = parse_ranks(options.ranks_per_host, options.hosts)

    # kill and a closed terminal end the run like Ctrl-C does: through `with`, which removes the cluster.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        with EmulatedCluster(
            options.hosts, options.rate, num_racks=options.racks, rack_rate=options.rack_rate
        ) as cluster:
            settings = {
                "mode": options.mode,
                "racks": options.racks,
                "sizes": [parse_size(word) for word in options.sizes.split(",")],
                "rounds": options.rounds,
                "contestants": options.contestants.split(","),
                "collective": options.collective,
                "counters": str(cluster.counters),
                "mark": MARK,
            }
            result = launch(cluster, ranks, settings, options.timeout)
    except ClusterUnavailable as error:
        return lacking("cluster.py", error)
    except KeyboardInterrupt:
        return 130
    wrong = [text for row in result["rows"] for text in judge(row, options)]
    if result["sessions"] > 1:
        wrong.append(f"the ranks are in {result['sessions']} sessions, which the kernel shares the cores among")
    report(result, options)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
