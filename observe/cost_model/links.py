"""Describes a box of ranks and its links, the input of the cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keras_ddl.errors import ConfigError


@dataclass(frozen=True)
class Dimension:
    """One dimension of the box of ranks, and the link through which each of its units reaches the others.

    Attributes:
        size: number of units that it joins, 1 or more.
        bandwidth: bytes/s that one unit sends while it receives as much; the ranks of the unit share it. For ranks that
            share memory, the busbw of `keras-ddl bench`, which includes the copies and the additions.
        latency: seconds that a message takes in addition to its bytes.
    """

    size: int
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.size < 1 or not self.bandwidth > 0 or not self.latency >= 0:
            raise ConfigError(
                "Dimension: size must be 1 or more, bandwidth (bytes/s) above 0, latency (seconds) 0 or more. "
                f"Received: size={self.size!r}, bandwidth={self.bandwidth!r}, latency={self.latency!r}."
            )

    @staticmethod
    def fit(size: int, points: Sequence[tuple[float, float]]) -> Dimension:
        """Returns the dimension whose link explains `points`: (bytes, seconds) of single messages, 2 sizes or more.

        Latency and 1 / bandwidth come from the line with the smallest relative errors, so that short messages weigh as
        much as long ones.

        Raises:
            ConfigError: fewer than two sizes, or times that do not grow with the size.
        """
        if len({nbytes for nbytes, _ in points}) < 2 or min(seconds for _, seconds in points) <= 0:
            raise ConfigError(
                f"Dimension.fit: messages of at least two sizes are needed, in seconds above 0. Received: {points!r}."
            )
        weights = [1 / seconds**2 for _, seconds in points]
        total = sum(weights)
        mean_n = sum(w * n for w, (n, _) in zip(weights, points)) / total
        mean_t = sum(w * t for w, (_, t) in zip(weights, points)) / total
        spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points))
        slope = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points)) / spread
        if slope <= 0:
            raise ConfigError(f"Dimension.fit: longer messages must take longer. Received: {points!r}. Measure again.")
        return Dimension(size, 1 / slope, max(0.0, mean_t - slope * mean_n))


def shared_memory(ranks: int, copy_bandwidth: float, cores: int | None = None) -> Dimension:
    """Returns the dimension of `ranks` ranks of one host, from the speed at which one core copies memory.

    It counts the passes over memory of the engine's staged schemes; a copy is one read and one write. Two ranks: a copy
    into the slot, then two reads and a write: 2.5 copies of N. L ranks: a copy of all but the rank's own share, a
    reduction of its own share, a copy of all shares out: 2.5 - 1/(2 L) copies of N. The speed is an upper bound: it
    does not count waiting, or that cores share the memory.

    Args:
        copy_bandwidth: bytes/s that one core copies for buffers of the given size (memcpy; caches help).
        cores: cores that the ranks share; default: one per rank.
    """
    if ranks < 1 or not copy_bandwidth > 0 or (cores is not None and cores < 1):
        raise ConfigError(
            "shared_memory: ranks and cores must be 1 or more, copy_bandwidth (bytes/s) above 0. "
            f"Received: ranks={ranks!r}, copy_bandwidth={copy_bandwidth!r}, cores={cores!r}."
        )
    copies = 2.5 if ranks <= 2 else 2.5 - 0.5 / ranks
    turns = 1.0 if cores is None else max(1.0, ranks / cores)
    return Dimension(ranks, max(1, 2 * (ranks - 1)) / max(1, ranks) / (copies * turns) * copy_bandwidth)


@dataclass(frozen=True)
class Cluster:
    """A box of ranks and its links.

    Attributes:
        dims: the dimensions, fastest first; one entry for a single host.
        reduction: bytes/s at which one rank adds received data to its own, for links other than shared memory (whose
            bandwidth includes it). Infinite: the additions are hidden behind the transfer.
        start: seconds until all ranks have agreed to begin; the time of a barrier.
    """

    dims: tuple[Dimension, ...]
    reduction: float = math.inf
    start: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(self.dims))
        if not self.dims or not self.reduction > 0 or not self.start >= 0:
            raise ConfigError(
                "Cluster: dims must have at least one dimension, reduction (bytes/s) must be above 0, and start "
                f"(seconds) must be 0 or more. Received: dims={self.dims!r}, reduction={self.reduction!r}, "
                f"start={self.start!r}."
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(dim.size for dim in self.dims)

    def ranks_of_unit(self, index: int) -> int:
        """Returns the number of ranks that share one link of dimension `index`."""
        return math.prod(dim.size for dim in self.dims[:index])
