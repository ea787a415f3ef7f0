"""What hosts must have alike before ranks start on them: told by each rank's wrapper, compared by the launcher.

Nothing here imports TensorFlow: versions are read from the packages' metadata, in some milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_ddl.launch.finding import Finding, Severity

TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-gpu", "tensorflow-intel", "tf-nightly-cpu")
VERSIONS = ("keras_ddl", "TensorFlow", "Keras", "Python")
# In KERAS_DDL_RUN_DIR, with several hosts.
CLOCK_FILE = "clock.json"
SHARED_MEMORY = "/dev/shm"
# With less, MPI cannot make its first segment: ranks of a host exchange data by slower ways. The doctor asks for more.
_LEAST_SHM = 8 << 20
CLOCKS_SECONDS = 1.0
_REMEDY_VERSIONS = "Install the same version on all hosts, as one environment on a shared file system or one image."
_REMEDY_CLOCKS = "Timelines, logs and the times of files will not fit together: run chrony or ntpd on every host."


def version(*distributions: str) -> str:
    """Returns the version of the first of these packages that is installed; "" for none."""
    from importlib import metadata  # 20 ms, which a job on one host does without

    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def free_shared_memory() -> int | None:
    """Returns the free bytes of /dev/shm; None: it cannot be used."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def facts() -> dict[str, Any]:
    """Returns what is compared, of this host; `clock` is read last."""
    return {
        "host": socket.gethostname(),
        "keras_ddl": version("keras_ddl"),
        "TensorFlow": version(*TENSORFLOWS),
        "Keras": version("keras"),
        "Python": ".".join(map(str, sys.version_info[:3])),
        "shm": free_shared_memory(),
        "clock": time.time(),
    }


def clock_offset(clock: float, sent: float, received: float) -> tuple[float, float]:
    """Returns (how far a clock is ahead of ours, how far that may be off), in seconds.

    The clock was read at some moment between our times `sent` and `received`: of the question and of its answer.
    """
    return clock - (sent + received) / 2, (received - sent) / 2


def told_clock(run_dir: str | None) -> dict[str, float] | None:
    """Returns the offset of this host's clock that the launcher has measured and told a rank; None without one."""
    try:
        found = json.loads((Path(run_dir or "") / CLOCK_FILE).read_text())
    except (OSError, ValueError):
        return None
    return {name: float(found[name]) for name in ("offset", "offset_error")} if len(found) == 2 else None


def compare_versions(told: Sequence[dict[str, Any]], names: Sequence[str] = VERSIONS) -> Iterator[Finding]:
    """Returns a finding for each name that is not alike on all hosts, and one for each that is."""
    first = told[0]
    for name in names:
        others = {f"{one[name] or 'none'} on {one['host']}" for one in told if one[name] != first[name]}
        if others:
            found = f"{first[name] or 'none'} on {first['host']}, but {', '.join(sorted(others))}"
            yield Finding(Severity.ERROR, f"versions of {name}", found, _REMEDY_VERSIONS)
        else:
            yield Finding(Severity.OK, f"versions of {name}", f"{first[name]} on all ranks")


def compare_clocks(told: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Returns a finding where clocks differ by more than their offsets ("offset", "offset_error") may be off."""
    known = [one for one in told if one.get("offset") is not None]
    slow = min(known, key=lambda one: one["offset"] + one["offset_error"], default=None)
    fast = max(known, key=lambda one: one["offset"] - one["offset_error"], default=None)
    if slow is None or fast is None:
        return
    apart = fast["offset"] - fast["offset_error"] - slow["offset"] - slow["offset_error"]
    if apart > CLOCKS_SECONDS:
        found = f"that of {slow['host']} is {fast['offset'] - slow['offset']:.1f} s behind that of {fast['host']}"
        yield Finding(Severity.WARNING, "clocks", f"{found} (expected: within {CLOCKS_SECONDS:g} s)", _REMEDY_CLOCKS)


def check_shared_memory(told: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Returns a finding for each host whose /dev/shm is too small, with which jobs are slower."""
    for free, host in sorted({(-1 if one["shm"] is None else one["shm"], one["host"]) for one in told}):
        if free < _LEAST_SHM:
            found = "not usable" if free < 0 else f"{free >> 10} KiB free"
            remedy = "Give containers more (docker run --shm-size=1g), or remove files that nobody uses."
            yield Finding(
                Severity.WARNING, SHARED_MEMORY, f"{found} (expected: {_LEAST_SHM >> 20} MiB or more)", remedy, host
            )


def compare(told: Sequence[dict[str, Any]]) -> list[Finding]:
    """Returns what must be said of these hosts before ranks start on them, worst first."""
    of_hosts = list({one["host"]: one for one in reversed(told)}.values())[::-1]
    findings = [*compare_versions(of_hosts), *check_shared_memory(of_hosts), *compare_clocks(of_hosts)]
    return sorted((each for each in findings if each.severity > Severity.OK), key=lambda each: -each.severity)
