"""Emulates hosts, racks and slow links on one Linux machine: network namespaces joined by shaped virtual cables.

Every host is a network namespace with one interface (eth0), which a token bucket limits to a rate in both directions.
The hosts of a rack share a bridge; uplinks with their own rate join the bridges of several racks. A program started on
a host also has its own host name, System V IPC and /dev/shm, so that MPI libraries see different hosts. Only /proc
shows the processes of all hosts. The counters of the virtual cables (`Cables`) tell how much went over the network.

The hosts share this machine's cores. Callers should start all programs on them in one session (see
benchmarks/sessions.py).

Needs Linux, root, and the tools of iproute2 and util-linux. Nothing touches the machine's own network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

PREFIX = "kddl"
TOOLS = ("ip", "tc", "unshare", "mount", "bash")
# Runs a command on a host. mpirun calls it like ssh: options, host, words of a command line.
AGENT = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
[ -f "@FOLDER@/rack-$host" ] && export KERAS_DDL_RACK="$(cat "@FOLDER@/rack-$host")"
exec ip netns exec "@NAME@-$host" unshare --uts --ipc --mount -- /bin/bash -c '
  hostname "$1"
  mount --bind "@FOLDER@/hosts" /etc/hosts
  mount -t tmpfs -o size=2g tmpfs /dev/shm
  cd "$2"; shift 2
  exec /bin/bash -c "$*"' _ "$host" "$PWD" "$@"
"""


class ClusterUnavailable(RuntimeError):
    """This machine cannot emulate a cluster; its message says why."""


def check_available() -> None:
    """Raises ClusterUnavailable unless this machine can make namespaces and shaped links."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise ClusterUnavailable(
            f"an emulated cluster needs the tools {', '.join(TOOLS)} (packages iproute2 and util-linux). "
            f"Missing: {', '.join(missing)}."
        )
    if os.geteuid() != 0:
        raise ClusterUnavailable(
            f"an emulated cluster needs root, to make network namespaces. Received: user id {os.geteuid()}. "
            "Use sudo, or a virtual machine of your own."
        )
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        _run(f"ip netns add {name}")
        _run(f"ip -n {name} link add v0 type veth peer name v1")
        _run(f"ip -n {name} link add b0 type bridge")
        _run(f"tc -n {name} qdisc add dev v0 root tbf rate 1gbit burst 256kb latency 40ms")
        _run(f"ip netns exec {name} unshare --uts --ipc --mount true")
    except subprocess.CalledProcessError as error:
        raise ClusterUnavailable(
            f"network namespaces are not permitted here (a container without privileges?): "
            f"`{error.cmd}` said: {error.stderr.strip()}"
        ) from None
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


class Cables:
    """Reads the byte counters of a cluster's cables. `path`: EmulatedCluster.counters; works from any host."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def sent(self) -> dict[str, int]:
        """Bytes sent so far, headers included, by each host ("h0") and by each rack through its uplink ("r0")."""
        totals = {}
        for line in self._path.read_text().splitlines()[2:]:
            device, numbers = line.split(":")
            fields = numbers.split()
            kind, number = device.strip()[0], device.strip()[1:]
            if kind == "p" and number.isdigit():
                totals[f"h{number}"] = int(fields[0])  # what the switch received from the host
            elif kind == "u" and number.isdigit():
                totals[f"r{number}"] = int(fields[8])
        return totals


class EmulatedCluster:
    """A context manager. The cluster exists inside `with`, and is removed afterwards, even after an error.

    Attributes:
        hosts: names of the hosts, h0, h1, ..., in the order of the racks.
        agent: path of a program that runs a command on a host: `agent h0 command words...`.
        counters: the argument of `Cables`.
    """

    def __init__(self, num_hosts: int, rate: str, *, num_racks: int = 1, rack_rate: str | None = None) -> None:
        """`rate`, `rack_rate`: in tc's spelling, e.g. "200mbit"; `num_hosts` is a multiple of `num_racks`."""
        if num_hosts % num_racks:
            raise ValueError(f"num_hosts must be a multiple of num_racks. Received: {num_hosts} and {num_racks}.")
        check_available()
        self.hosts = [f"h{i}" for i in range(num_hosts)]
        self._rate = rate
        self._num_racks = num_racks
        self._rack_rate = rack_rate or rate
        self._name = f"{PREFIX}{os.getpid()}"
        self._anchor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmulatedCluster:
        remove_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self._name}-"))
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Returns the command line that runs `words` on `host`."""
        return [str(self.agent), host, *words]

    def _build(self) -> None:
        switch = f"{self._name}-sw"
        _run(f"ip netns add {switch}")
        racks = range(self._num_racks)
        bridges = [f"br{rack}" for rack in racks]
        for bridge in bridges + (["core"] if self._num_racks > 1 else []):
            _run(f"ip -n {switch} link add {bridge} type bridge && ip -n {switch} link set {bridge} up")
        if self._num_racks > 1:
            for rack in racks:
                _run(f"ip -n {switch} link add u{rack} type veth peer name d{rack}")
                for device, bridge in ((f"u{rack}", bridges[rack]), (f"d{rack}", "core")):
                    _run(f"ip -n {switch} link set {device} master {bridge} up")
                    self._shape(switch, device, self._rack_rate)
        lines = ["127.0.0.1 localhost"]
        for i, host in enumerate(self.hosts):
            space = f"{self._name}-{host}"
            _run(f"ip netns add {space} && ip -n {space} link set lo up")
            _run(f"ip -n {space} link add eth0 type veth peer name p{i} netns {switch}")
            _run(f"ip -n {space} addr add 10.77.{i // 250}.{i % 250 + 1}/16 dev eth0 && ip -n {space} link set eth0 up")
            self._set_congestion_control(space)
            rack = i * self._num_racks // len(self.hosts)
            if self._num_racks > 1:
                (self._folder / f"rack-{host}").write_text(f"r{rack}")
            _run(f"ip -n {switch} link set p{i} master {bridges[rack]} up")
            self._shape(space, "eth0", self._rate)
            self._shape(switch, f"p{i}", self._rate)
            lines.append(f"10.77.{i // 250}.{i % 250 + 1} {host}")
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        self.agent = self._folder / "agent"
        self.agent.write_text(AGENT.replace("@NAME@", self._name).replace("@FOLDER@", str(self._folder)))
        self.agent.chmod(0o755)
        # A process in the switch shows the switch's counters to every host, through /proc.
        self._anchor = subprocess.Popen(["ip", "netns", "exec", switch, "sleep", "infinity"])
        self.counters = Path(f"/proc/{self._anchor.pid}/net/dev")
        while not Cables(self.counters).sent() and self._anchor.poll() is None:  # `ip` enters the switch a bit later
            time.sleep(0.01)

    @staticmethod
    def _set_congestion_control(space: str) -> None:
        # Linux's default, if permitted, whatever this machine uses. Others distort times: bbr stops for 0.2 s every ten
        # seconds to probe the delay.
        words = ["ip", "netns", "exec", space, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic"]
        subprocess.run(words, capture_output=True)

    @staticmethod
    def _shape(space: str, device: str, rate: str) -> None:
        _run(f"tc -n {space} qdisc replace dev {device} root tbf rate {rate} burst 256kb latency 40ms")

    def _remove(self) -> None:
        # A second Ctrl-C waits until the removal is done.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            if self._anchor is not None:
                self._anchor.kill()
                self._anchor.wait()
                self._anchor = None
            _remove_namespaces(self._name)
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remove_namespaces(name: str) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    for space in [line.split()[0] for line in listed if line.startswith(f"{name}-")]:
        for _ in range(100):  # again, because a process may start another one meanwhile
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.01)
        subprocess.run(["ip", "netns", "del", space], capture_output=True)


def remove_abandoned() -> None:
    """Removes the leftovers of clusters whose process was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    for name in {line.split()[0].split("-")[0] for line in listed if line.startswith(PREFIX)}:
        owner = name[len(PREFIX) :]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove_namespaces(name)
