"""Measures how long the processes of one session can keep those of another from running; see docs/errors.md.

    python benchmarks/sessions.py --groups 4 --seconds 8

Starts groups of one process that polls, like a rank that waits in MPI, and four that sleep for a moment repeatedly,
like communication threads. First all groups are in one session, then each has its own. Prints the longest time for
which a process did not run. Linux puts every session in its own scheduling group if
/proc/sys/kernel/sched_autogroup_enabled is 1.
"""

from __future__ import annotations

import argparse
import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from _smoke import options_of

SLEEPERS = 4  # of a group
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def longest_gap(pause: float, end: float) -> float:
    """Returns the longest time between two looks at the clock, in seconds. A look follows each pause."""
    longest, last = 0.0, time.monotonic()
    while last < end:
        if pause:
            time.sleep(pause)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


def run_group(pipe: Connection, own_session: bool, end: float) -> None:
    """Sends the longest gap of the group's processes through `pipe`."""
    if own_session:
        os.setsid()
    ends = []
    for number in range(1 + SLEEPERS):
        receiving, sending = os.pipe()
        if os.fork() == 0:
            os.write(sending, repr(longest_gap(50e-6 if number else 0.0, end)).encode())
            os._exit(0)
        os.close(sending)
        ends.append(receiving)
    pipe.send(max(float(os.read(receiving, 64)) for receiving in ends))


def measure(groups: int, own_sessions: bool, seconds: float) -> float:
    """Returns the longest gap of any process, in seconds."""
    context = get_context("fork")
    end = time.monotonic() + seconds
    pipes = []
    for _ in range(groups):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=run_group, args=(theirs, own_sessions, end)).start()
        pipes.append(ours)
    return max(pipe.recv() for pipe in pipes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4, help="groups of a process that polls and four that sleep")
    parser.add_argument("--seconds", type=float, default=8, help="duration of each of the two measurements")
    options = options_of(parser, groups=1, seconds=0.2)
    grouped = AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else "not there"
    print(f"Linux {os.uname().release}, {len(os.sched_getaffinity(0))} cores, sched_autogroup_enabled: {grouped}")
    for where, own_sessions in (("one session", False), ("a session each", True)):
        gap = measure(options.groups, own_sessions, options.seconds)
        print(f"{options.groups} groups, {where}: a process waited for {gap * 1e3:.0f} ms at most", flush=True)


if __name__ == "__main__":
    main()
