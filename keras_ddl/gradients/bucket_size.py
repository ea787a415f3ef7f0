"""Chooses how many bytes of gradients go into one bucket: a fixed number, or by measurement.

Large buckets use the links well; small ones start earlier and overlap more with backward. Horovod fuses up to a fixed
64 MB (Sergeev & Del Balso, arXiv 1802.05799, section 4), PyTorch's DDP uses 25 MB after a first bucket of 1 MB (Li et
al., VLDB 2020). Here "auto" is the smallest size that reaches 90 % of the bandwidth, measured on this job's ranks and
links.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from keras_ddl import communicator, config
from keras_ddl.communicator.group import Communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.topology import Topology

AUTO = "auto"
# Sizes that are measured. Below the first, TensorFlow's cost of starting an op outweighs that of the links.
SIZES = tuple(size << 20 for size in (1, 2, 4, 8, 16, 32))
BANDWIDTH_FRACTION = 0.9
_REPEAT = 3
# If one reduction takes longer, larger sizes are not measured: that is long enough to keep the link busy.
_LONGEST_SECONDS = 0.1
# Auto: at least this many buckets, so that the first are sent while others are still computed.
_MIN_BUCKETS = 4
# The size for communicators that lack some ranks. "auto" does not measure these.
_SUBSET_BYTES = 8 << 20


class BucketSize(NamedTuple):
    """The size of buckets. `measured`: by "auto"; its bound also depends on the total bytes of the gradients."""

    bytes: int
    measured: bool

    def bound(self, total_bytes: int) -> int:
        """Returns the bound on the bytes of one bucket, for gradients of `total_bytes` in total."""
        if not self.measured:
            return self.bytes
        return min(self.bytes, max(SIZES[0], total_bytes // _MIN_BUCKETS))


class _Job:
    """The job's cached sizes: the size that was measured, and the size that ranks have agreed on in `of`."""

    lock = threading.Lock()
    topology: Topology | None = None
    measured: int | None = None
    agreed: BucketSize | None = None

    @classmethod
    def begin(cls) -> None:
        """Drops the values of an earlier job of this process."""
        if cls.topology is not communicator.topology():
            cls.topology, cls.measured, cls.agreed = communicator.topology(), None, None


def agree(bucket_bytes: int | None = None) -> BucketSize:
    """Returns the size of rank 0, for all ranks. COLLECTIVE.

    Args:
        bucket_bytes: None for KERAS_DDL_BUCKET_BYTES.
    Cost: one object sent; "auto" measures once per job, up to _LONGEST_SECONDS for the last of a few sizes (in total
        tens of milliseconds between ranks of one host).
    """
    size = config.get("BUCKET_BYTES") if bucket_bytes is None else bucket_bytes
    if communicator.size() > 1 or history.takes_newcomers():
        size = communicator.broadcast_object(size, name="keras_ddl/bucket_bytes")
    if size != AUTO:
        return BucketSize(int(size), measured=False)
    return BucketSize(history.recorded("keras_ddl/bucket_size", _measured), measured=True)


def _measured() -> int:
    _Job.begin()
    if _Job.measured is None:
        _Job.measured = SIZES[0] if communicator.size() == 1 else choose(measure())
    return _Job.measured


def of(comm: Communicator) -> BucketSize:
    """Returns the size for the ranks of `comm`, by KERAS_DDL_BUCKET_BYTES.

    COLLECTIVE with all ranks in a job's first call only, because later a rank may retrace its step at any time.
    """
    if comm.id != communicator.communicator_of(None).id:  # a measurement would be a collective of all ranks
        size = config.get("BUCKET_BYTES")
        return BucketSize(_SUBSET_BYTES, True) if size == AUTO else BucketSize(size, False)
    with _Job.lock:
        _Job.begin()
        if _Job.agreed is None:
            _Job.agreed = agree()
        return _Job.agreed


def measure(clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Measures an all-reduce: bytes -> seconds, equal on all ranks. COLLECTIVE."""
    import numpy as np

    name = "keras_ddl/bucket_probe"
    array = np.zeros(SIZES[-1] // 4, np.float32)  # its pages are allocated when they are used
    seconds: dict[int, float] = {}
    for size in SIZES:
        part = array[: size // 4]
        times = []
        for _ in range(_REPEAT + 1):  # the first allocates pages
            begin = clock()
            communicator.all_reduce_array(part, name=name, out=part)
            times.append(clock() - begin)
        # The maximum over ranks of every rank's minimum, which leaves out other load on the machines.
        own = np.array([min(times[1:])])
        seconds[size] = float(communicator.all_reduce_array(own, op="max", name=name)[0])
        if seconds[size] > _LONGEST_SECONDS:
            break
    return seconds


def choose(seconds: Mapping[int, float]) -> int:
    """Returns the smallest size that reaches BANDWIDTH_FRACTION of the best bandwidth; `seconds`: by size."""
    bandwidth = {size: size / max(time, 1e-9) for size, time in seconds.items()}
    best = max(bandwidth.values())
    return min(size for size, one in bandwidth.items() if one >= BANDWIDTH_FRACTION * best)
