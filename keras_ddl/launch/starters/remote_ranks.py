"""Starts the ranks of a job on several hosts without mpirun, by running host_ranks.py on each (on other hosts by ssh).

    python -P -m keras_ddl.launch.starters.remote_ranks --hosts h0:2,h1:2 -np 3 --spares 1 -- python train.py

Spares take the slots after the ranks. With --more, stdin is a connection to the launcher, over which it can ask for
more processes later (Kind.START_ON_HOST).

This program replaces mpirun. The loss of a host ends no ranks on other hosts: each host has its own process for its
ranks, and the launcher, to which every rank is connected, decides what continues. The settings for host_ranks go to its
stdin, where nobody else can read them.

A fault-tolerant MPI (ULFM, in Open MPI 5) is no remedy: its mpirun ends the job when one of its daemons is lost, it
aborts a process whose daemon is gone, and it does not notice a death behind shared memory.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from keras_ddl import config
from keras_ddl.launch.hosts import parse_hosts
from keras_ddl.launch.hosts.placement import ranks_by_host
from keras_ddl.launch.rank.processes import die_with_parent
from keras_ddl.launch.starters.host_ranks import READY
from keras_ddl.link.channel import Channel
from keras_ddl.link.kinds import Kind
from keras_ddl.link.loop import READ, Source, serve

_FORWARDED = ("PYTHONPATH", "LD_LIBRARY_PATH")  # variables that Python on another host may need
_OUTPUT_BYTES = 1 << 16


class _OnHost:
    """The process that runs host_ranks on one host."""

    def __init__(self, name: str, message: dict[str, object], *, may_fail: bool) -> None:
        self.name, self.may_fail = name, may_fail
        self.is_ready = False
        self._head = b""  # output received before it is ready
        self.process = subprocess.Popen(
            command_on(name, os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.output = self.process.stdout
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its exit status tells why

    def pass_on(self) -> bool:
        """Forwards output. Returns False at the end of the output."""
        data = os.read(self.output.fileno(), _OUTPUT_BYTES)
        if self.is_ready:
            os.write(1, data)
            return bool(data)
        self._head += data
        self.is_ready = READY in self._head
        if self.is_ready or not data:
            os.write(1, self._head.replace(READY, b"", 1))
        return bool(data)


class _Running:
    """The hosts on which ranks run."""

    def __init__(self, size: int, num_hosts: int, program: Sequence[str]) -> None:
        self.hosts: list[_OnHost] = []
        self.orders: Channel | None = None
        self.has_failed = False  # the job cannot start
        self.status = 0  # the first exit status other than 0 of host_ranks on a host that was not lost
        self._common = {
            "launcher": os.environ[config.VARIABLES["LAUNCHER"].environment_name],
            "job": config.get("JOB_ID"),
            "size": size,
            "hosts": num_hosts,
            "program": list(program),
        }

    def start(self, host: str, first: int, local_ranks: Sequence[int], local_size: int, *, may_fail: bool) -> None:
        """Starts processes. local_size: limit for this host. may_fail: the job can run without these processes."""
        message = {"first": first, "local_ranks": local_ranks, "local_size": local_size}
        self.hosts.append(_OnHost(host, {**self._common, **message}, may_fail=may_fail))

    def sources(self) -> Iterator[Source]:
        """Yields the sources that the loop waits for."""
        for host in self.hosts:
            yield host.output.fileno(), READ, partial(self._pass_on, host)
        if self.orders is not None and not self.orders.closed:
            yield self.orders.fileno(), READ, partial(self._obey, self.orders)

    def _obey(self, orders: Channel) -> None:
        for _, payload in orders.read():
            self.start(**json.loads(payload), may_fail=True)

    def _pass_on(self, host: _OnHost) -> None:
        """Forwards a host's output, and handles its end."""
        if host.pass_on():
            return
        self.hosts.remove(host)
        ended = host.process.wait()
        if host.is_ready:
            # ssh fails when its host is lost. The launcher gets the ranks' exit statuses itself.
            self.status = self.status or max(0, ended if ended != 255 else 0)
            return
        starter, remedy = "host_ranks", ""
        if not _is_here(host.name):
            starter = config.get("SSH")
            remedy = f" Check that `{starter} {host.name} true` works without a password, and that the host has "
            remedy += f"{sys.executable}."
        why = f"{starter} ended with status {ended}"
        if host.may_fail and self.orders is not None:
            self.orders.send(Kind.NOT_STARTED, {"host": host.name, "why": why})
        else:
            print(f"The ranks of host {host.name} could not be started: {why}.{remedy}")
            self.status, self.has_failed = 1, True


def main(argv: list[str]) -> int:
    """Starts the ranks and waits. Returns the first status other than 0 of host_ranks on a host that was not lost."""
    end = argv.index("--")
    options = dict(zip(argv[: end - end % 2 : 2], argv[1:end:2]))
    hosts, size, spares = parse_hosts(options["--hosts"]), int(options["-np"]), int(options.get("--spares", 0))
    takes_more = "--more" in argv[:end]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda *_: None)  # the launcher passes them on
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # the agents get it, too
    counts = ranks_by_host(size + spares, hosts)
    running = _Running(size, len(counts) + takes_more, argv[end + 1 :])
    first = 0
    for name, count in counts.items():
        ranks = min(count, size - first) if first < size else count
        running.start(name, first, list(range(count)), ranks, may_fail=False)
        first += count
    if takes_more:
        running.orders = Channel(socket.socket(fileno=sys.stdin.fileno()), None)
    while running.hosts and not running.has_failed:
        serve(None, running.sources())
    for other in running.hosts:
        other.process.terminate()
    return running.status


def command_on(host: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the command line that starts a host's part of a job. `environ`: the environment of this process."""
    command = [sys.executable, "-P", "-m", "keras_ddl.launch.starters.host_ranks", "--from-stdin"]
    if _is_here(host):
        return command
    variables = [f"{each}={environ[each]}" for each in _FORWARDED if environ.get(each)]
    return [*shlex.split(config.get("SSH", environ)), host, shlex.join(["env", *variables, *command])]


def _is_here(name: str) -> bool:
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own, own.partition(".")[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
