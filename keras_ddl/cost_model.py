"""How long an all-reduce takes, predicted from the latency and the bandwidth of each kind of link.

The ranks form a box, fastest dimension first: ranks of a host, hosts of a rack, racks. A message of n bytes takes
latency + n / bandwidth (Hockney, 1994: alpha + beta n). What the model adds is who shares a link. A *unit* of a
dimension is what it joins: a rank in dimension 0, a host in dimension 1, a rack in dimension 2. Each unit has one link,
in both directions at once, that all its ranks share; and what leaves a rack leaves through the links of its hosts too.

    cluster = Cluster((Dimension(4, 40e9), Dimension(64, 12.5e9, 2e-6)))
    predict(cluster, 100e6)      # {"ring": 0.0169, "2-d": 0.0198, ...}, seconds
    choose(cluster, 100e6)       # the fastest of those that the engine has

N below is nbytes: those of one rank's buffer. Pure arithmetic: knows no ranks, no MPI and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from keras_ddl.errors import ConfigError

# Bytes of one rank's shard that the engine sends between hosts at a time (kShardBytes of native/core/src/box.cc).
SHARD_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Dimension:
    """One dimension of the box of ranks, and the link by which each of its units reaches the others.

    Attributes:
        size: how many units it joins, 1 or more.
        bandwidth: bytes/s that one unit sends while it receives as much; the ranks of the unit share it. For ranks that
            share memory: what `keras-ddl bench` calls busbw, which contains the copies and the additions.
        latency: seconds that a message takes beyond its bytes.
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

        Latency and 1 / bandwidth are the line through the points that is nearest in proportion, so that short messages
        weigh as much as long ones.

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


@dataclass(frozen=True)
class Cluster:
    """A box of ranks and its links.

    Attributes:
        dims: fastest dimension first; one entry for a single host.
        reduction: bytes/s at which one rank adds what has arrived to what it has, for links other than shared memory
            (whose bandwidth contains it). Infinite: it is hidden behind the transfer.
    """

    dims: tuple[Dimension, ...]
    reduction: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(self.dims))
        if not self.dims or not self.reduction > 0:
            raise ConfigError(
                "Cluster: at least one dimension, and a speed of reduction above 0 bytes/s. "
                f"Received: dims={self.dims!r}, reduction={self.reduction!r}."
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(dim.size for dim in self.dims)

    def ranks_of_unit(self, index: int) -> int:
        """Returns how many ranks share one link of dimension `index`."""
        return math.prod(dim.size for dim in self.dims[:index])


@dataclass(frozen=True)
class Stage:
    """What one stage of an all-reduce takes, all ranks doing the same.

    Attributes:
        latency: seconds of its steps beyond their bytes.
        links: per dimension, seconds for which the link of one unit is busy sending (and receiving).
        adding: seconds of additions that the links do not contain.
    """

    latency: float
    links: tuple[float, ...]
    adding: float

    @property
    def seconds(self) -> float:
        """Its duration: the busiest link decides."""
        return self.latency + max(self.links) + self.adding


def ring_stage(cluster: Cluster, nbytes: float, first: int, stop: int) -> Stage:
    """The rings through dimensions `first` to `stop` - 1: neighbours of the box are neighbours in a ring.

    The dimensions before `first` have been reduced: every unit of `first` has as many rings as ranks, each of them for
    its own part of the data. For G units in a ring, in 2 (G-1) steps, each unit sends 2 (G-1)/G N: half to reduce, half
    to gather (Patarasuk and Yuan, 2009).
    """
    dims, ranks = cluster.dims, cluster.ranks_of_unit
    units = math.prod(dim.size for dim in dims[first:stop])
    steps = 2 * (units - 1)
    sent = steps * nbytes / units
    # A ring crosses a link of its own dimensions once, going and coming. On the way out of its unit it shares the links
    # of the dimensions inside, all but the memory of the host.
    load = [
        sent * ranks(j) / ranks(first) if 0 < j < first else sent if first <= j < stop else 0.0
        for j in range(len(dims))
    ]
    in_shared_memory = stop == 1
    return Stage(
        steps * max((dim.latency for dim in dims[first:stop] if dim.size > 1), default=0.0),
        tuple(nbytes_j / dim.bandwidth for nbytes_j, dim in zip(load, dims)),
        0.0 if in_shared_memory else sent / 2 / ranks(first) / cluster.reduction,
    )


def ring(cluster: Cluster, nbytes: float) -> float:
    """Seconds of a flat ring in host order: 2 (P-1) alpha + 2 (P-1)/P N / B + (P-1)/P N / reduction.

    Its bandwidth term does not grow with P and is the least possible (Patarasuk and Yuan, 2009); its latency does grow.
    alpha and B are those of the worst link.
    """
    return ring_stage(cluster, nbytes, 0, len(cluster.dims)).seconds


def scattered_ring(cluster: Cluster, nbytes: float) -> float:
    """Seconds of a flat ring in the worst order, every rank's neighbours being as far away as possible.

    What a round-robin placement of ranks makes of a ring: all ranks of a host (of a rack) send through its one link in
    every step, so the bandwidth term is as many times that of `ring` as a host has ranks.
    """
    if cluster.size == 1:
        return 0.0
    chunk = nbytes / cluster.size
    far = [index for index, dim in enumerate(cluster.dims) if dim.size > 1]
    step = max(
        cluster.dims[i].latency + chunk * (cluster.ranks_of_unit(i) if i else 1) / cluster.dims[i].bandwidth
        for i in far
    )
    return 2 * (cluster.size - 1) * step + (cluster.size - 1) * chunk / cluster.reduction


def recursive_doubling(cluster: Cluster, nbytes: float) -> float:
    """Seconds of exchanging everything with partners at distance 1, 2, 4, ...: lg P (alpha + N/B + N / reduction).

    The fewest steps, hence the best for small messages, but N bytes in each (Thakur, Rabenseifner and Gropp, 2005,
    section 4.5). All ranks of a unit send at once. A dimension whose size is no power of two folds the surplus ranks
    in before and out after: two steps more.
    """
    total = 0.0
    for index, dim in enumerate(cluster.dims):
        exchanges = dim.size.bit_length() - 1
        folds = 0 if dim.size == 1 << exchanges else 2
        transfer = dim.latency + _through(cluster, index, nbytes)
        total += (exchanges + folds) * transfer + (exchanges + folds // 2) * nbytes / cluster.reduction
    return total


def halving_doubling(cluster: Cluster, nbytes: float) -> float:
    """Seconds of a reduce-scatter by halving and an all-gather by doubling (Rabenseifner, 2004).

    2 lg P alpha + 2 (P-1)/P N/B + (P-1)/P N / reduction on equal links (Thakur, Rabenseifner and Gropp, 2005, section
    4.5): few steps and the least bytes. In a box it goes along the fastest dimension first, so that little is left to
    send on the slow links. Folding, for a size that is no power of two, sends N twice.
    """
    total = 0.0
    left = float(nbytes)  # bytes of one rank that are still to be reduced
    for index, dim in enumerate(cluster.dims):
        exchanges = dim.size.bit_length() - 1
        if dim.size != 1 << exchanges:
            total += 2 * (dim.latency + _through(cluster, index, left)) + left / cluster.reduction
        sent = left * (1 - 2.0**-exchanges)
        total += 2 * (exchanges * dim.latency + _through(cluster, index, sent)) + sent / cluster.reduction
        left -= sent
    return total


def stages(cluster: Cluster, nbytes: float, depth: int) -> list[Stage]:
    """The stages of the multi-dimensional ring (arXiv 1708.02188) over a box cut into `depth` dimensions.

    Stage k is a reduce-scatter and, on the way back, an all-gather along dimension k on what the stages before have
    left: 1/L of the data per rank after L ranks. The last stage is a ring through all the remaining dimensions. With
    depth 1 that is the flat ring.

    Raises:
        ConfigError: the box has fewer dimensions.
    """
    count = len(cluster.dims)
    if not 1 <= depth <= count:
        raise ConfigError(f"stages: depth must be 1 to {count}, the number of dimensions. Received: depth={depth!r}.")
    return [ring_stage(cluster, nbytes, k, k + 1 if k < depth - 1 else count) for k in range(depth)]


def box(cluster: Cluster, nbytes: float, depth: int) -> float:
    """Seconds of the multi-dimensional ring when its stages run one after the other. See `stages` for its errors."""
    return sum(stage.seconds for stage in stages(cluster, nbytes, depth))


def pipelined_box(cluster: Cluster, nbytes: float, depth: int, shard_bytes: float = SHARD_BYTES) -> float:
    """Seconds of the multi-dimensional ring in blocks, one stage of a block beside other stages of other blocks.

    The first block passes through all stages; the others follow at the pace of the slowest stage, or of the busiest
    link where stages share one.

    Args:
        shard_bytes: bytes of one rank's share of a block, after the first dimension.

    Raises:
        ConfigError: as `stages`.
    """
    blocks = max(1, math.ceil(nbytes / (shard_bytes * cluster.dims[0].size)))
    each = stages(cluster, nbytes / blocks, depth)
    link = max(sum(busy) for busy in zip(*(stage.links for stage in each)))
    pace = max(link, *(stage.seconds for stage in each))
    return sum(stage.seconds for stage in each) + (blocks - 1) * pace


def algorithms(cluster: Cluster) -> dict[str, Callable[[Cluster, float], float]]:
    """Returns the algorithms that make a difference for this cluster, by name: (cluster, nbytes) -> seconds."""
    result: dict[str, Callable[[Cluster, float], float]] = {
        "ring": ring,
        "scattered ring": scattered_ring,
        "recursive doubling": recursive_doubling,
        "halving doubling": halving_doubling,
    }
    for depth in range(2, len(cluster.dims) + 1):
        result[f"{depth}-d"] = partial(box, depth=depth)
        result[f"{depth}-d pipelined"] = partial(pipelined_box, depth=depth)
    return result


def predict(cluster: Cluster, nbytes: float, names: Iterable[str] | None = None) -> dict[str, float]:
    """Returns the seconds of an all-reduce of `nbytes` bytes by algorithm.

    Args:
        nbytes: bytes of one rank's buffer.
        names: which algorithms; default: all of `algorithms(cluster)`.

    Raises:
        ConfigError: negative bytes, or an algorithm that there is not.
    """
    known = algorithms(cluster)
    chosen = list(known) if names is None else list(names)
    strangers = [name for name in chosen if name not in known]
    if strangers or not nbytes >= 0:
        raise ConfigError(
            f"predict: nbytes must be 0 or more, and names among {', '.join(map(repr, known))} for a box of "
            f"{len(cluster.dims)} dimension(s). Received: nbytes={nbytes!r}, names={chosen!r}."
        )
    return {name: known[name](cluster, nbytes) for name in chosen}


def choose(cluster: Cluster, nbytes: float, names: Iterable[str] | None = None) -> str:
    """Returns the fastest algorithm for `nbytes` bytes, among `names` (default: those that the engine has).

    Of two that take equally long the one named first wins.

    Raises:
        ConfigError: as `predict`.
    """
    if names is None:
        names = engine_algorithms(cluster)
    seconds = predict(cluster, nbytes, names)
    return min(seconds, key=seconds.__getitem__)


def engine_algorithms(cluster: Cluster) -> list[str]:
    """Returns the names of what the native engine can run on this box between hosts, by choosing its dimensions."""
    return ["ring", *(f"{depth}-d" for depth in range(2, len(cluster.dims) + 1))]


def _through(cluster: Cluster, index: int, nbytes: float) -> float:
    """Seconds of all ranks sending `nbytes` along dimension `index` at once; they share the links on their way."""
    own = [nbytes * cluster.ranks_of_unit(j) / cluster.dims[j].bandwidth for j in range(1, index + 1)]
    return max(own) if own else nbytes / cluster.dims[0].bandwidth
