"""Which strategy trains your model? Runs one set of Keras programs under keras_ddl and its peers and in one process.

    python benchmarks/scoreboard.py                               # keras_ddl and tf.distribute
    python -m venv jax && jax/bin/pip install keras jax           # environments of their own for the others
    python benchmarks/scoreboard.py --jax jax/bin/python --torch torch/bin/python --json board.json

Every peer has two ranks, replicas or devices on this host's CPUs, and runs a program as its documentation says. The
results (weights, logs, evaluate and predict) are compared with those of the same program in one process of the same
backend, from the same data, seeds and initial weights, in float64:

    equal         within 1e-9 of the largest weight after 4 to 24 steps; 1e-5 on JAX and torch, where Keras turns
                  float64 into float32 in many operations; --list shows which programs allow more
    wrong         different values and no error, with the difference relative to the largest weight or logged value
    refused       an error; its first line is below the table
    crashed, hung a process died; the time limit passed (--limit)
    draws differ  equal without its random layers; with them it draws other random numbers than one process
    -             one process of this backend cannot run it, or the peer documents no way to run it

The programs are in benchmarks/_scoreboard/programs/, and benchmarks/_scoreboard/peers.py follows each peer's
documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from _scoreboard import jobs
from _scoreboard.judge import EQUAL, KINDS, NONE, Outcome, Verdict, judge
from _scoreboard.peers import PEERS, REFERENCES, TENSORFLOW_ENVIRONMENT, Peer
from _smoke import options_of

NAMES = {NONE: "not run"}  # names of kinds in the notes below the table
Board = dict[str, dict[str, Verdict]]  # by program and peer


def interpreter(peer: type[Peer], options: argparse.Namespace) -> str | None:
    """Returns the Python of a peer's environment, or None if the user named none."""
    named = {"tensorflow": sys.executable, "jax": options.jax, "torch": options.torch}[peer.backend]
    return named and str(Path(named).absolute())


def fill(
    names: list[str], peers: list[type[Peer]], options: argparse.Namespace
) -> tuple[Board, dict[str, dict[str, str]]]:
    """Runs all programs, first in one process of each backend; prints a line for each."""
    from _scoreboard.programs import PROGRAMS

    board: Board = {name: {} for name in names}
    expected: dict[tuple[str, str], Outcome] = {}
    versions: dict[str, dict[str, str]] = {}
    for backend in dict.fromkeys(peer.backend for peer in peers):
        one = REFERENCES[backend]
        supported = [name for name in names if backend in PROGRAMS[name].backends]

        def record_expected(name: str, outcomes: list[Outcome], backend: str = backend) -> None:
            expected[name, backend] = outcomes[0]
            note = outcomes[0].error or outcomes[0].ended
            print(f"{REFERENCES[backend].name:22}{name:26}{'' if note == EQUAL else note}", flush=True)

        versions[one.name] = jobs.run(
            one, interpreter(one, options), supported, options.limit, record_expected, options.output
        )
    for peer in peers:
        runs = []
        for name in names:
            each = PROGRAMS[name]
            if peer.backend not in each.backends:
                board[name][peer.name] = Verdict(NONE, f"not for the {peer.backend} backend")
            elif each.of_logs and not peer.logs:
                board[name][peer.name] = Verdict(NONE, "no way to compute it over all processes is documented")
            elif expected[name, peer.backend].error or expected[name, peer.backend].ended != EQUAL:
                board[name][peer.name] = judge(expected[name, peer.backend], [])
            else:
                runs.append(name)

        def record_verdict(name: str, outcomes: list[Outcome], peer: type[Peer] = peer) -> None:
            tolerance = max(PROGRAMS[name].tolerance, peer.tolerance)
            verdict = judge(expected[name, peer.backend], outcomes, tolerance, peer.logs)
            board[name][peer.name] = verdict
            seconds = max(each.seconds for each in outcomes)
            print(f"{peer.name:22}{name:26}{verdict.cell():14}{seconds:5.1f} s  {verdict.detail}", flush=True)
            write(options.json, board, versions)

        versions[peer.name] = jobs.run(
            peer, interpreter(peer, options), runs, options.limit, record_verdict, options.output
        )
    return board, versions


def table(board: Board, peers: list[type[Peer]]) -> list[str]:
    """Returns the table in Markdown, and below it, for each peer, the programs with a note."""
    from _scoreboard.programs import PROGRAMS

    def verdict(name: str, peer: type[Peer]) -> Verdict:
        return board[name].get(peer.name, Verdict("not run"))

    rows = [["program", *(peer.name for peer in peers)]]
    rows += [[PROGRAMS[name].about, *(verdict(name, peer).cell() for peer in peers)] for name in board]
    for kind in KINDS:
        counts = [sum(verdict(name, peer).kind == kind for name in board) for peer in peers]
        if any(counts):
            rows.append([f"**{kind}**", *(f"**{count}**" for count in counts)])
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for peer in peers:
        notes: dict[str, list[str]] = {}
        for name in board:
            if (each := verdict(name, peer)).detail:
                notes.setdefault(f"{NAMES.get(each.kind, each.kind)}: {each.detail}", []).append(PROGRAMS[name].about)
        if notes:
            lines += ["", f"{peer.name}:", ""]
        for note, programs in notes.items():
            lines.append(f"- {'; '.join(programs) if len(programs) < 4 else f'{len(programs)} programs'}: {note}")
    return lines


def show(board: Board, peers: list[type[Peer]], versions: dict[str, dict[str, str]]) -> None:
    print("\n".join(table(board, peers)) + "\n")
    for name, parts in versions.items():
        print(f"{name}: {', '.join(f'{part} {version}' for part, version in parts.items())}")


def write(file: str | None, board: Board, versions: dict[str, dict[str, str]]) -> None:
    """Writes the verdicts so far, if the user has named a file."""
    if not file:
        return
    verdicts = {name: {peer: asdict(each) for peer, each in row.items()} for name, row in board.items()}
    counts: dict[str, dict[str, int]] = {}
    for row in board.values():
        for peer, each in row.items():
            peer_counts = counts.setdefault(peer, {})
            peer_counts[each.kind] = peer_counts.get(each.kind, 0) + 1
    Path(file).write_text(json.dumps({"versions": versions, "verdicts": verdicts, "counts": counts}, indent=1))


def read(files: list[Path]) -> tuple[Board, dict[str, dict[str, str]]]:
    """Returns what --json wrote. Verdicts in later files replace those in earlier files."""
    from _scoreboard.programs import PROGRAMS

    seen: Board = {}
    versions: dict[str, dict[str, str]] = {}
    for file in files:
        result = json.loads(file.read_text())
        versions |= result["versions"]
        for name, row in result["verdicts"].items():
            seen.setdefault(name, {}).update({peer: Verdict(**each) for peer, each in row.items()})
    return {name: seen[name] for name in PROGRAMS if name in seen}, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax", metavar="PYTHON", help="a Python with keras and jax (default: without this peer)")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python with keras and torch (default: without this peer)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs (default: all)")
    parser.add_argument("--strategy", nargs="+", metavar="NAME", choices=PEERS, help=f"peers among {', '.join(PEERS)}")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a program may take (default: 300)")
    parser.add_argument("--json", metavar="FILE", help="write the verdicts, with versions")
    parser.add_argument(
        "--show", nargs="+", metavar="FILE", help="show the table of files written by --json, and run nothing"
    )
    parser.add_argument("--output", action="store_true", help="show the last lines of processes that died or hung")
    parser.add_argument("--list", action="store_true", help="show programs and peers, and run nothing")
    for each in ("--worker", "--process", "--folder"):
        parser.add_argument(each, help=argparse.SUPPRESS)
    options = options_of(parser, only=["short_odd"], strategy=["keras_ddl"])
    if options.worker:
        from _scoreboard.worker import work

        work(options.worker, int(options.process), Path(options.folder), options.only, options.limit)
        return
    os.environ |= TENSORFLOW_ENVIRONMENT  # listing the programs imports TensorFlow in this process, too
    from _scoreboard.programs import PROGRAMS

    if unknown := set(options.only or ()) - PROGRAMS.keys():
        parser.error(f"--only: unknown: {', '.join(sorted(unknown))}. --list shows the programs")
    names = [name for name in PROGRAMS if not options.only or name in options.only]
    chosen = [peer for peer in PEERS.values() if not options.strategy or peer.name in options.strategy]
    peers = [peer for peer in chosen if interpreter(peer, options)]
    if options.list:
        for name in names:
            each = PROGRAMS[name]
            print(f"{name:26}{each.tolerance:7.0e}  {each.about} ({', '.join(each.backends)})")
        print("".join(f"\n{peer.name:14}{peer.about}" for peer in PEERS.values()))
        return
    if options.show:
        board, versions = read([Path(each) for each in options.show])
        show(board, [peer for peer in PEERS.values() if any(peer.name in row for row in board.values())], versions)
        return
    if absent := [peer.name for peer in chosen if peer not in peers]:
        print(f"Without {', '.join(absent)}: pass a Python that has them as --jax or --torch.", flush=True)
    if not peers:
        parser.error("no peer is left")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit also ends the peers' processes
    began = time.monotonic()
    board, versions = fill(names, peers, options)
    print(f"\n{len(names)} programs in {(time.monotonic() - began) / 60:.0f} minutes.\n")
    show(board, peers, versions)
    write(options.json, board, versions)


if __name__ == "__main__":
    main()
