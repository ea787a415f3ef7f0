"""Checks the checkpoint directory: its file system, and whether the operations of a checkpoint work there."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keras_ddl.launch.checks.finding import Finding, Severity

_GIB = 1 << 30
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "virtiofs")
_IN_MEMORY = ("tmpfs", "ramfs")
_CONTAINER_LAYERS = ("overlay", "aufs")
_SLOW_SECONDS = 1.0
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo: mount point, file system type, source, and all options."""

    point: str
    kind: str
    source: str
    options: frozenset[str]


def check(directory: Path, root: Path) -> Iterator[Finding]:
    """Yields the findings about a directory, or about its nearest existing parent."""
    where = directory.resolve()
    while not where.exists():
        where = where.parent
    if not os.access(where, os.W_OK):
        remedy = "Checkpoints cannot be written there: choose another directory."
        yield Finding(Severity.ERROR, "directory", f"{where} is not writable", remedy)
        return
    mount = mount_of(where, mounts(root))
    if mount is not None:
        yield from _kind(where, mount)
    free = shutil.disk_usage(where).free
    if free < _GIB:
        remedy = "A checkpoint with Adam takes three times the weights' bytes, and for a while two checkpoints exist."
        yield Finding(Severity.WARNING, "directory", f"{where} has {free / _GIB:.2f} GiB free", remedy)
    yield from _probe(where)


def _kind(where: Path, mount: Mount) -> Iterator[Finding]:
    location = f"{where} is on {mount.kind} ({mount.source})"
    if mount.kind in _NETWORK:
        remedy = "Checkpoints there survive the loss of a host. Let only rank 0 write, as callbacks.Checkpoint does."
        yield Finding(Severity.NOTE, "directory", location, remedy)
    if mount.kind.startswith("nfs") and mount.options & {"soft", "softerr"}:
        remedy = "A slow server then makes writes fail or get lost: mount it with the option hard."
        yield Finding(Severity.WARNING, "NFS", f"{mount.point} is mounted with soft", remedy)
    if mount.kind in _IN_MEMORY:
        remedy = "Checkpoints there take memory, and are lost when the host restarts: choose a disk."
        yield Finding(Severity.WARNING, "directory", location, remedy)
    if mount.kind in _CONTAINER_LAYERS:
        remedy = "Checkpoints there are lost with the container: mount a volume for them."
        yield Finding(Severity.NOTE, "directory", location, remedy)


def _probe(where: Path) -> Iterator[Finding]:
    """Tries the steps of a checkpoint: writes a hidden directory, syncs it to disk, renames it, and reads it back."""
    data, began = os.urandom(_PROBE_BYTES), time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-doctor-", dir=where) as folder:
            staged, final = Path(folder) / "staged", Path(folder) / "final"
            staged.mkdir()
            with (staged / "data").open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            staged.rename(final)
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            same = (final / "data").read_bytes() == data
    except OSError as error:
        remedy = "A checkpoint must be written, synced and renamed there: choose a directory where that works."
        yield Finding(Severity.ERROR, "directory", f"{where}: {error.strerror or error}", remedy)
        return
    seconds = time.perf_counter() - began
    timing = f"1 MiB written, synced, renamed and read in {seconds:.2f} s"
    if not same:
        remedy = "Do not store anything there."
        yield Finding(Severity.ERROR, "directory", f"{where} returns other bytes than were written", remedy)
    elif seconds > _SLOW_SECONDS:
        remedy = "Checkpoints are slow there. Check whether the server or disk is busy."
        yield Finding(Severity.WARNING, "directory", f"{where}: {timing}", remedy)
    else:
        yield Finding(Severity.OK, "directory", f"{where}: {timing}")


def mounts(root: Path) -> list[Mount]:
    """Returns the mounts that this process sees, oldest first."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [mount for line in lines if (mount := parse(line)) is not None]


def parse(line: str) -> Mount | None:
    """Parses a line of mountinfo (proc_pid_mountinfo(5)); None: it is invalid.

    36 35 0:42 / /ckpt rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2,hard
    """
    before, dash, after = line.partition(" - ")
    first, last = before.split(" "), after.split(" ")
    if not dash or len(first) < 6 or len(last) < 3:
        return None
    options = frozenset(",".join([first[5], *last[2:]]).split(","))
    return Mount(_unescaped(first[4]), last[0], _unescaped(last[1]), options)


def mount_of(path: Path, candidates: list[Mount]) -> Mount | None:
    """Returns the mount of a path: the longest mount point above it, or the last of equal ones."""
    above = [each for each in candidates if path.is_relative_to(each.point)]
    longest = max((len(each.point) for each in above), default=0)
    return next((each for each in reversed(above) if len(each.point) == longest), None)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
