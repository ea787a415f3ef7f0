"""Emulates hosts on this machine with their own network, names and shared memory, for tests of ranks on several."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from harness.source_modules import ROOT, load_program

_emulated = load_program(ROOT / "tools" / "emulated_cluster.py")


def can_make_namespaces(*options: str) -> bool:
    """Whether this machine allows `unshare` with these options; usually only root may use them."""
    command = ["unshare", *options, "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


class Hosts:
    """The hosts h0, h1, ...: `run` starts keras_ddl's commands on h0, from where mpirun reaches the others."""

    def __init__(self, cluster: object, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.agent_path = str(cluster.agent)
        self.agent = f"--prtemca plm_ssh_agent {cluster.agent}"

    def run(self, command: str, *words: object, env: Mapping[str, str] | None = None) -> str:
        """Returns the output of `command` of this environment; fails the test unless it ended with status 0."""
        done = subprocess.run(
            self.command([str(Path(sys.executable).with_name(command)), *words]),
            cwd=self._folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command(self, words: Sequence[object]) -> list[str]:
        """Returns the command line that runs `words` on h0."""
        return self._cluster.command("h0", [shlex.quote(str(word)) for word in words])  # ssh runs a shell, too

    def cut(self, host: str, *, off: bool = True) -> None:
        """Takes the host off the network, like a pulled cable, or reconnects it."""
        state = "down" if off else "up"
        subprocess.run(self._cluster.command(host, ["ip", "link", "set", "eth0", state]), check=True)

    def sent(self) -> dict[str, int]:
        """Returns the bytes that each host has sent so far."""
        return _emulated.Cables(self._cluster.counters).sent()


@contextlib.contextmanager
def emulated_hosts(folder: Path, number: int, *, num_racks: int = 1) -> Iterator[Hosts]:
    """Yields `number` hosts; skips the test if this machine cannot emulate them."""
    try:
        with _emulated.EmulatedCluster(number, "1gbit", num_racks=num_racks) as cluster:
            yield Hosts(cluster, folder)
    except _emulated.ClusterUnavailable as why:
        pytest.skip(str(why))
