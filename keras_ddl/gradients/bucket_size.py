"""How many bytes of gradients go into one bucket: a fixed number, or as many as a measurement says.

A large bucket uses the links well; small ones start earlier and overlap more with backward. Horovod fuses up to a fixed
64 MB (Sergeev & Del Balso, arXiv 1802.05799, section 4), PyTorch's DDP takes 25 MB after a first bucket of 1 MB (Li et
al., VLDB 2020). Here the smallest size is taken that reaches 90 % of the bandwidth, as measured on the ranks and links
of this job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from keras_ddl import communicator, config
from keras_ddl.communicator.group import Communicator
from keras_ddl.topology import Topology

AUTO = "auto"
# Sizes that are tried. Below the first, what TensorFlow takes to start an op and hand over its tensors counts for more
# than what the links do.
SIZES = tuple(size << 20 for size in (1, 2, 4, 8, 16, 32))
BANDWIDTH_FRACTION = 0.9
_REPEAT = 3
# A link so slow that one reduction takes longer is busy for long enough with less: larger sizes are not tried.
_LONGEST_SECONDS = 0.1
# Auto: this many buckets at least, so that the first are on their way while others are still computed.
_MIN_BUCKETS = 4
# Buckets of some of the ranks, where "auto" measures nothing.
_BYTES_OF_SOME_RANKS = 8 << 20


class BucketSize(NamedTuple):
    """What `agree` returns. `measured`: by "auto", which also looks at how many bytes there are in all."""

    bytes: int
    measured: bool

    def bound(self, total_bytes: int) -> int:
        """Returns the bound on one bucket for gradients of `total_bytes` together."""
        if not self.measured:
            return self.bytes
        return min(self.bytes, max(SIZES[0], total_bytes // _MIN_BUCKETS))


class _Job:
    """Per-job cache: the measured bucket size, and the size on which `of` has agreed."""

    lock = threading.Lock()
    topology: Topology | None = None
    measured: int | None = None
    agreed: BucketSize | None = None

    @classmethod
    def begin(cls) -> None:
        """Forgets an earlier job of this process."""
        if cls.topology is not communicator.topology():
            cls.topology, cls.measured, cls.agreed = communicator.topology(), None, None


def agree(bucket_bytes: int | str | None = None) -> BucketSize:
    """Returns the size on which all ranks agree: rank 0's. COLLECTIVE.

    Args:
        bucket_bytes: a number, "auto", or None for KERAS_DDL_BUCKET_BYTES.
    Cost: one object sent; "auto" measures once per job, up to _LONGEST_SECONDS for the last of a few sizes (tens of
        milliseconds in all between ranks of one host).
    """
    wanted = config.get("BUCKET_BYTES") if bucket_bytes is None else bucket_bytes
    if communicator.size() > 1:
        wanted = communicator.broadcast_object(wanted, name="keras_ddl/bucket_bytes")
    if wanted != AUTO:
        return BucketSize(int(wanted), measured=False)
    _Job.begin()
    if _Job.measured is None:
        _Job.measured = SIZES[0] if communicator.size() == 1 else choose(measure())
    return BucketSize(_Job.measured, measured=True)


def of(comm: Communicator) -> BucketSize:
    """Returns the size for the ranks of `comm`, by KERAS_DDL_BUCKET_BYTES. COLLECTIVE for the first gradients of all
    ranks, and no more: a rank may trace its step anew at any later time.
    """
    if comm.id != communicator.communicator_of(None).id:  # a measurement would be a collective of all ranks
        wanted = config.get("BUCKET_BYTES")
        return BucketSize(_BYTES_OF_SOME_RANKS, True) if wanted == AUTO else BucketSize(wanted, False)
    with _Job.lock:
        _Job.begin()
        if _Job.agreed is None:
            _Job.agreed = agree()
        return _Job.agreed


def measure(clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Returns the seconds of an all-reduce by its bytes, equal on all ranks. COLLECTIVE."""
    import numpy as np

    name = "keras_ddl/bucket_probe"
    array = np.zeros(SIZES[-1] // 4, np.float32)  # its pages cost nothing until a size touches them
    seconds: dict[int, float] = {}
    for size in SIZES:
        part = array[: size // 4]
        times = []
        for _ in range(_REPEAT + 1):  # the first touches memory
            begin = clock()
            communicator.all_reduce_array(part, name=name, out=part)
            times.append(clock() - begin)
        # The slowest rank's fastest: what the links can do, not what else the machine did meanwhile.
        own = np.array([min(times[1:])])
        seconds[size] = float(communicator.all_reduce_array(own, op="max", name=name)[0])
        if seconds[size] > _LONGEST_SECONDS:
            break
    return seconds


def choose(seconds: Mapping[int, float]) -> int:
    """Returns the smallest size that reaches BANDWIDTH_FRACTION of the best bandwidth among `seconds` by size."""
    bandwidth = {size: size / max(time, 1e-9) for size, time in seconds.items()}
    best = max(bandwidth.values())
    return min(size for size, one in bandwidth.items() if one >= BANDWIDTH_FRACTION * best)
