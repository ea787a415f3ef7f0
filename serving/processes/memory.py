"""Measures and limits a process's memory, and returns free memory to the system."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

MEGABYTE = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def collect() -> None:
    """Returns unused memory to the system, if the C library can.

    Python keeps memory in cycles (tracebacks refer to requests), and the C library keeps freed memory for later.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def bound(more: int) -> None:
    """Limits this process's memory to `more` bytes beyond its present size, and disables core files.

    The limit is RLIMIT_DATA, for private writable memory. RLIMIT_AS would be misleading: the C library reserves 64 MB
    of address space for each thread.
    """
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmData:")[2].split()[0]) * 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + more if most == resource.RLIM_INFINITY else min(now + more, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
