"""Starts the ranks of a job on several hosts without mpirun: host_ranks.py on each, on other hosts by ssh.

    python -P -m keras_ddl.launch.remote_ranks --hosts h0:2,h1:2 -np 4 -- python train.py

It takes mpirun's place. A host that is lost later takes nothing with it: the ranks of the others belong to processes of
their own hosts, and the launcher, to which every rank is connected, decides what goes on. What host_ranks must know is
written to its stdin, where nobody else can read it.

Why not by an MPI that survives (ULFM, in Open MPI 5): its mpirun ends the job when one of its daemons is lost, a
process whose daemon is gone is aborted, and a death behind shared memory is not noticed.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from keras_ddl import config
from keras_ddl.launch.host_ranks import READY
from keras_ddl.launch.mpirun import Host, parse_hosts
from keras_ddl.launch.placement import ranks_by_host
from keras_ddl.launch.processes import die_with_parent

_FORWARDED = ("PYTHONPATH", "LD_LIBRARY_PATH")  # what the python of another host may need
_OUTPUT_BYTES = 1 << 16


class _OnHost:
    """The process that runs host_ranks on one host."""

    def __init__(self, name: str, message: dict[str, object]) -> None:
        self.name = name
        self.is_ready = False
        self._head = b""  # of the output, before it is ready
        command = [sys.executable, "-P", "-m", "keras_ddl.launch.host_ranks", "--from-stdin"]
        if not _is_here(name):
            variables = [f"{each}={os.environ[each]}" for each in _FORWARDED if os.environ.get(each)]
            command = [*shlex.split(config.get("SSH")), name, shlex.join(["env", *variables, *command])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=lambda: die_with_parent(signal.SIGTERM)
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.output = self.process.stdout
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which its status tells

    def pass_on(self) -> bool:
        """Passes output on. Returns False at its end."""
        data = os.read(self.output.fileno(), _OUTPUT_BYTES)
        if self.is_ready:
            os.write(1, data)
            return bool(data)
        self._head += data
        self.is_ready = READY in self._head
        if self.is_ready or not data:
            os.write(1, self._head.replace(READY, b"", 1))
        return bool(data)


def main(argv: list[str]) -> int:
    """Entry point. Returns the first status other than 0 of host_ranks on a host that has not been lost, or 0."""
    hosts, num_ranks, program = parse_hosts(argv[1]), int(argv[3]), argv[5:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda *_: None)  # the launcher passes them on
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # the agents get it, too
    running = _start(hosts, num_ranks, program)
    status = 0
    while running:
        poll = select.poll()
        by_fd = {each.output.fileno(): each for each in running}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            each = by_fd[fd]
            if each.pass_on():
                continue
            running.remove(each)
            ended = each.process.wait()
            if not each.is_ready:
                who = "host_ranks" if _is_here(each.name) else config.get("SSH")
                print(f"The ranks of host {each.name} could not be started: {who} ended with status {ended}.")
                for other in running:
                    other.process.terminate()
                return 1
            # After that, ssh fails when its host is lost. Statuses of ranks go to the launcher.
            status = status or max(0, ended if ended != 255 else 0)
    return status


def _start(hosts: Sequence[Host], num_ranks: int, program: Sequence[str]) -> list[_OnHost]:
    counts = ranks_by_host(num_ranks, hosts)
    common = {
        "launcher": os.environ[config.VARIABLES["LAUNCHER"].environment_name],
        "folder": config.get("HOST_FOLDER"),
        "size": num_ranks,
        "hosts": len(counts),
        "program": list(program),
    }
    started, first = [], 0
    for name, count in counts.items():
        started.append(_OnHost(name, {**common, "first": first, "count": count}))
        first += count
    return started


def _is_here(name: str) -> bool:
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own, own.partition(".")[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
