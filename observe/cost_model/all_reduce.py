"""Predicts the time of an all-reduce from the latency and the bandwidth of each kind of link.

The ranks form a box, fastest dimension first: ranks of a host, hosts of a rack, racks. A message of n bytes takes
latency + n / bandwidth (Hockney, 1994: alpha + beta n). The model adds that ranks share links. A dimension joins
*units*: ranks in dimension 0, hosts in dimension 1, racks in dimension 2. Each unit has one full-duplex link that all
its ranks share, and a message that leaves a rack also passes the link of its host.

    cluster = Cluster((Dimension(4, 40e9), Dimension(64, 12.5e9, 2e-6)))
    predict(cluster, 100e6)      # {"ring": 0.0169, "2-d": 0.0198, ...}, seconds
    choose(cluster, 100e6)       # the fastest algorithm of the engine

N below is nbytes, the bytes of one rank's buffer. This module is pure arithmetic and uses no ranks, MPI or engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from keras_ddl.cost_model.links import Cluster
from keras_ddl.errors import ConfigError

# How the engine cuts what it sends between hosts (net/wire.h, hierarchy/ in native/core/src): a block gives every
# rank a shard of one message per unit of the ring, up to a bound, and several blocks are in progress at once.
MESSAGE_BYTES = 60 * 1024
LARGEST_SHARD_BYTES = 8 * 1024 * 1024
BLOCKS_AHEAD = 4


@dataclass(frozen=True)
class Stage:
    """The times of one stage of an all-reduce, in which all ranks do the same.

    Attributes:
        latency: seconds of its steps apart from their bytes.
        links: for each dimension, seconds for which the link of one unit is busy sending (and receiving).
        adding: seconds of additions that are not part of the links' times.
    """

    latency: float
    links: tuple[float, ...]
    adding: float

    @property
    def seconds(self) -> float:
        """The stage's duration, which the busiest link determines."""
        return self.latency + max(self.links) + self.adding


def ring_stage(cluster: Cluster, nbytes: float, first: int, stop: int) -> Stage:
    """Returns the stage of rings through dimensions `first` to `stop` - 1, which keep the order of the box.

    The dimensions before `first` are already reduced, so every unit of `first` has as many rings as ranks, each ring
    for its own part of the data. With G units in a ring, each unit sends 2 (G-1)/G N in 2 (G-1) steps: half to reduce,
    half to gather (Patarasuk and Yuan, 2009).
    """
    dims, ranks = cluster.dims, cluster.ranks_of_unit
    units = math.prod(dim.size for dim in dims[first:stop])
    steps = 2 * (units - 1)
    sent = steps * nbytes / units
    # A ring crosses each link of its own dimensions once in each direction. On its way out of a unit it shares the
    # links of the inner dimensions, except the host's memory.
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

    Its bandwidth term does not grow with P and is the least possible (Patarasuk and Yuan, 2009); its latency grows.
    alpha and B are the values of the worst link.
    """
    return ring_stage(cluster, nbytes, 0, len(cluster.dims)).seconds


def scattered_ring(cluster: Cluster, nbytes: float) -> float:
    """Seconds of a flat ring in the worst order, in which every rank's neighbours are as far away as possible.

    This is a ring with round-robin placement of ranks: all ranks of a host (of a rack) send through its one link in
    every step. With L ranks on a host, the bandwidth term is L times that of `ring`.
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

    It has the fewest steps, so it is best for small messages, but each step sends N bytes (Thakur, Rabenseifner and
    Gropp, 2005, section 4.5). All ranks of a unit send at once. A dimension whose size is not a power of two needs two
    more steps, which fold the surplus ranks in before and out after.
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
    4.5): few steps and the fewest bytes. In a box it takes the fastest dimension first, so that little is left to send
    on the slow links. Folding, for a size that is not a power of two, sends N twice.
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

    Stage k is a reduce-scatter and, on the way back, an all-gather along dimension k of the data that earlier stages
    left: 1/L per rank after L ranks. The last stage is a ring through all the remaining dimensions. With depth 1 it is
    the flat ring.

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


def pipelined_box(
    cluster: Cluster, nbytes: float, depth: int, shard_bytes: float | None = None, ahead: int = BLOCKS_AHEAD
) -> float:
    """Seconds of the multi-dimensional ring in blocks, some on the wire while others are in shared memory.

    The first block passes through all stages. The others follow at the pace of the busiest link, or at `ahead` blocks
    per passage of one block if that is slower: while a block waits, messages of others travel.

    Args:
        shard_bytes: bytes of one rank's share of a block, after the first dimension. Default: the engine's.
        ahead: blocks in progress at once.

    Raises:
        ConfigError: as `stages`.
    """
    ranks_of_group = cluster.dims[0].size if depth > 1 else 1
    if shard_bytes is None:
        shard_bytes = min(MESSAGE_BYTES * cluster.size / ranks_of_group, LARGEST_SHARD_BYTES)
    blocks = max(1, math.ceil(nbytes / (shard_bytes * ranks_of_group)))
    each = stages(cluster, nbytes / blocks, depth)
    alone = sum(stage.seconds for stage in each)
    busiest = max(sum(stage.links[i] for stage in each) for i in range(len(cluster.dims)))
    return alone + (blocks - 1) * max(busiest, alone / min(ahead, blocks))


def algorithms(cluster: Cluster) -> dict[str, Callable[[Cluster, float], float]]:
    """Returns the algorithms that differ on this cluster: name -> function (cluster, nbytes) -> seconds."""
    result: dict[str, Callable[[Cluster, float], float]] = {
        "ring": ring,
        "ring pipelined": partial(pipelined_box, depth=1),
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
        names: the algorithms; default: all of `algorithms(cluster)`.

    Raises:
        ConfigError: nbytes is negative, or an algorithm does not exist.
    """
    known = algorithms(cluster)
    chosen = list(known) if names is None else list(names)
    unknown = [name for name in chosen if name not in known]
    if unknown or not nbytes >= 0:
        raise ConfigError(
            f"predict: nbytes must be 0 or more, and names among {', '.join(map(repr, known))} for a cluster of "
            f"{len(cluster.dims)} dimension(s). Received: nbytes={nbytes!r}, names={chosen!r}."
        )
    return {name: cluster.start + known[name](cluster, nbytes) for name in chosen}


def choose(cluster: Cluster, nbytes: float, names: Iterable[str] | None = None) -> str:
    """Returns the fastest algorithm for `nbytes` bytes among `names` (default: the engine's algorithms).

    If two are equally fast, it returns the one named first.

    Raises:
        ConfigError: as `predict`.
    """
    if names is None:
        names = engine_algorithms(cluster)
    seconds = predict(cluster, nbytes, names)
    return min(seconds, key=seconds.__getitem__)


def engine_algorithms(cluster: Cluster) -> list[str]:
    """Returns the names of the algorithms that the native engine can run on this box, from one dimension to all."""
    return ["ring pipelined", *(f"{depth}-d pipelined" for depth in range(2, len(cluster.dims) + 1))]


def mode_for(cluster: Cluster, nbytes: float) -> str:
    """Returns the fastest mode for `nbytes` bytes, for `keras_ddl.init` and `keras-ddl run --mode`.

    Examples: "x:4x64" for 64 hosts of 4 ranks in one dimension, "x:4x16x4" for the same hosts in 4 racks. Three
    dimensions are faster if the links between racks are slow or there are many racks. With few racks two may be faster,
    because every dimension adds a stage that the first block must pass.

    Args:
        cluster: the whole job, its ranks placed host by host, its hosts rack by rack.
        nbytes: bytes of one reduction; for training, the size of a bucket.
    """
    name = choose(cluster, nbytes)
    sizes = [dim.size for dim in cluster.dims]
    inner = engine_algorithms(cluster).index(name)  # dimensions with their own stage, before the last stage
    if inner == 0:
        return f"x:1x{cluster.size}" if len(sizes) > 1 else f"x:{cluster.size}"
    return "x:" + "x".join(map(str, [*sizes[:inner], math.prod(sizes[inner:])]))


def _through(cluster: Cluster, index: int, nbytes: float) -> float:
    """Seconds if all ranks send `nbytes` along dimension `index` at once and share the links on the way."""
    own = [nbytes * cluster.ranks_of_unit(j) / cluster.dims[j].bandwidth for j in range(1, index + 1)]
    return max(own) if own else nbytes / cluster.dims[0].bandwidth
