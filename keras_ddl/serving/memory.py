"""What a process holds, how much more it may come to hold, and how it gives memory back to the system."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

MEGABYTE = 2**20


def resident_bytes() -> int:
    """Returns what of this process is in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def collect() -> None:
    """Returns to the system what nobody needs any more, where the C library can.

    Python keeps it in cycles (exceptions that went through frames hold their requests), and the C library for later.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def bound(more: int) -> None:
    """Lets this process allocate `more` bytes beyond what it has now; the system refuses what goes beyond.

    RLIMIT_DATA counts private writable memory. Address space (RLIMIT_AS) says less: the C library reserves 64 MB of it
    for each thread. A process that the system ends leaves no core file.
    """
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmData:")[2].split()[0]) * 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + more if most == resource.RLIM_INFINITY else min(now + more, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
