"""Facts that must be equal on all hosts before ranks start; wrappers report them and the launcher compares them.

This module does not import TensorFlow: versions are read from the packages' metadata, in milliseconds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from keras_ddl import config
from keras_ddl.launch.checks.finding import Finding, Severity
from keras_ddl.link import program
from keras_ddl.packages import TENSORFLOWS, version

VERSIONS = ("keras_ddl", "TensorFlow", "Keras", "Python")
SHARED_MEMORY = "/dev/shm"
# With less, MPI cannot create its first segment, and the ranks of a host use slower paths. The doctor recommends more.
_LEAST_SHM = 8 << 20
CLOCKS_SECONDS = 1.0
_REMEDY_VERSIONS = (
    "Install the same version on all hosts, from one environment on a shared file system or one container image."
)
_REMEDY_CLOCKS = "Timelines, logs and file times cannot be compared between hosts: run chrony or ntpd on every host."


def free_shared_memory() -> int | None:
    """Returns the free bytes of /dev/shm; None: it cannot be used."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def facts() -> dict[str, Any]:
    """Returns this host's facts; `clock` is read last."""
    return {
        "host": socket.gethostname(),
        "keras_ddl": version("keras_ddl"),
        "TensorFlow": version(*TENSORFLOWS),
        "Keras": version("keras"),
        "Python": ".".join(map(str, sys.version_info[:3])),
        "shm": free_shared_memory(),
        "has_rack": config.get("RACK") is not None,
        "clock": time.time(),
    }


def clock_offset(clock: float, sent: float, received: float) -> tuple[float, float]:
    """Returns how far another host's clock is ahead of ours, and the bound of the error, both in seconds.

    clock: the time that the other host read, between our times `sent` (of the request) and `received` (of the reply).
    """
    return clock - (sent + received) / 2, (received - sent) / 2


def measured_clock() -> dict[str, float] | None:
    """Returns this host's clock offset as measured by the launcher, or None."""
    link = program.current()
    return None if link is None else link.job_fact("clock") or None


def compare_versions(hosts: Sequence[dict[str, Any]], names: Sequence[str] = VERSIONS) -> Iterator[Finding]:
    """Yields a finding for each package name: an error if versions differ. `hosts`: each host's facts."""
    first = hosts[0]
    for name in names:
        others = {f"{host[name] or 'none'} on {host['host']}" for host in hosts if host[name] != first[name]}
        if others:
            found = f"{first[name] or 'none'} on {first['host']}, but {', '.join(sorted(others))}"
            yield Finding(Severity.ERROR, f"versions of {name}", found, _REMEDY_VERSIONS)
        else:
            yield Finding(Severity.OK, f"versions of {name}", f"{first[name]} on all ranks")


def compare_clocks(hosts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yields a finding if clocks differ by more than the error bounds of their offsets."""
    known = [host for host in hosts if host.get("offset") is not None]
    slow = min(known, key=lambda host: host["offset"] + host["offset_error"], default=None)
    fast = max(known, key=lambda host: host["offset"] - host["offset_error"], default=None)
    if slow is None or fast is None:
        return
    apart = fast["offset"] - fast["offset_error"] - slow["offset"] - slow["offset_error"]
    if apart > CLOCKS_SECONDS:
        found = f"the clock of {slow['host']} is {fast['offset'] - slow['offset']:.1f} s behind that of {fast['host']}"
        yield Finding(Severity.WARNING, "clocks", f"{found} (expected: within {CLOCKS_SECONDS:g} s)", _REMEDY_CLOCKS)


def check_shared_memory(hosts: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yields a finding for each host whose /dev/shm is so small that jobs are slower."""
    for free, host in sorted({(-1 if facts["shm"] is None else facts["shm"], facts["host"]) for facts in hosts}):
        if free < _LEAST_SHM:
            found = "not usable" if free < 0 else f"{free >> 10} KiB free"
            remedy = "Give containers more (docker run --shm-size=1g), or remove unused files."
            yield Finding(
                Severity.WARNING, SHARED_MEMORY, f"{found} (expected: {_LEAST_SHM >> 20} MiB or more)", remedy, host
            )


def compare(ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    """Returns the problems of the ranks' hosts, worst first. `ranks`: the facts that each rank reported."""
    hosts = list({facts["host"]: facts for facts in reversed(ranks)}.values())[::-1]
    findings = [*compare_versions(hosts), *check_shared_memory(hosts), *compare_clocks(hosts)]
    return sorted((each for each in findings if each.severity > Severity.OK), key=lambda each: -each.severity)
