"""The layout of ranks: which ranks share a host or memory, and the box of dimensions that they form.

It uses neither MPI nor TensorFlow. launcher.py and tf_config.py read the launcher's variables and TF_CONFIG.
keras_ddl.cost_model predicts the cost of an all-reduce on such a box.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from keras_ddl.errors import ConfigError

__all__ = [
    "Topology",
    "make_topology",
    "parse_mode",
    "part_of",
]


def __dir__() -> list[str]:
    return sorted(__all__)


_FORCED = re.compile(r"(?:[xprbnmc]:)?([0-9]+(?:x[0-9]+)*)")


@dataclass(frozen=True)
class Topology:
    """The place of one rank among all ranks.

    Attributes:
        rank: this process, 0 <= rank < size.
        size: number of ranks.
        hosts: index of the host of each rank; hosts are numbered in the order of their lowest rank.
        group: per rank, the lowest rank with which it shares memory.
        mode: the mode of this topology, as `plain_mode` writes it.
        dims: the box of ranks, fastest dimension first; () if hosts have different numbers of ranks.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]
    group: tuple[int, ...]
    mode: str
    dims: tuple[int, ...]

    @property
    def num_hosts(self) -> int:
        """Number of hosts that run a rank."""
        return len(set(self.hosts))

    @property
    def local_rank(self) -> int:
        """Position of this rank among the ranks of its host, for choosing a device; independent of the mode."""
        return sum(host == self.hosts[self.rank] for host in self.hosts[: self.rank])

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's host."""
        return self.hosts.count(self.hosts[self.rank])


def make_topology(
    rank: int, host_names: Sequence[str], mode: str = "p", rack_names: Sequence[str | None] | None = None
) -> Topology:
    """Returns the topology of `rank` among `len(host_names)` ranks.

    Args:
        host_names: per rank, any string that is equal for ranks of one host and differs between hosts.
        mode: see `parse_mode`.
        rack_names: per rank, the rack of its host (KERAS_DDL_RACK), or None. In mode 'p', racks with equal numbers of
            hosts and ranks, numbered rack by rack, become a third dimension.

    Raises:
        ConfigError: as `parse_mode`; or only some ranks have a rack; or two ranks of a host have different racks.
    """
    numbers: dict[str, int] = {}
    hosts = tuple(numbers.setdefault(name, len(numbers)) for name in host_names)
    dims, group = parse_mode(mode, hosts)
    racks = _rack_of_each_host(hosts, rack_names or [None] * len(hosts))
    if mode == "p" and dims:
        hosts_of_racks = [len(list(run)) for _, run in itertools.groupby(racks)]
        even = len(set(hosts_of_racks)) == 1 and len(set(racks)) == len(hosts_of_racks)
        if even and 1 < hosts_of_racks[0] < len(racks):
            dims = (dims[0], hosts_of_racks[0], len(hosts_of_racks))
    return Topology(rank, len(hosts), hosts, group, plain_mode(mode), dims)


def _rack_of_each_host(hosts: Sequence[int], rack_names: Sequence[str | None]) -> list[str | None]:
    """Returns the racks in the order of the hosts' numbers."""
    racks: dict[int, str | None] = {}
    for rank, (host, rack) in enumerate(zip(hosts, rack_names)):
        first = racks.setdefault(host, rack)
        if rack != first or (rack is None) != (rack_names[0] is None):
            other = hosts.index(host) if rack != first else 0
            raise ConfigError(
                "KERAS_DDL_RACK must be equal on all ranks of a host, and set on all hosts or on none. Received: "
                f"{rack_names[other]!r} on rank {other} and {rack!r} on rank {rank}."
            )
    return list(racks.values())


def part_of(parent: Topology, ranks: Sequence[int]) -> Topology:
    """Returns the topology of a subset of ranks, which share memory as in `parent`.

    Its box keeps the dimensions of `parent` in which these ranks still form a box: racks with equal numbers of hosts,
    numbered rack by rack, remain a dimension.

    Args:
        ranks: ranks of `parent`, in the order of the new ranks; `parent.rank` is among them.
    """
    numbers: dict[int, int] = {}
    hosts = tuple(numbers.setdefault(parent.hosts[rank], len(numbers)) for rank in ranks)
    leaders = [parent.group[rank] for rank in ranks]
    group = tuple(leaders.index(leader) for leader in leaders)
    lengths = {group.count(leader) for leader in group}
    dims = (lengths.pop(), *_outer_dims(parent, list(dict.fromkeys(leaders)))) if len(lengths) == 1 else ()
    return Topology(ranks.index(parent.rank), len(ranks), hosts, group, parent.mode, dims)


def _outer_dims(parent: Topology, leaders: Sequence[int]) -> tuple[int, ...]:
    """Returns the box that some groups of `parent`, identified by their leaders, form; at worst one dimension."""
    numbers = {leader: number for number, leader in enumerate(dict.fromkeys(parent.group))}
    places = [numbers[leader] for leader in leaders]
    strides, block = [1], 1
    for size in parent.dims[1:-1]:
        block *= size  # groups of a rack of `parent`
        runs = [(rack, len(list(run))) for rack, run in itertools.groupby(place // block for place in places)]
        lengths = {length for _, length in runs}
        if len(lengths) == 1 and len({rack for rack, _ in runs}) == len(runs):
            strides.append(lengths.pop())
    strides.append(len(places))
    return tuple(after // before for before, after in itertools.pairwise(strides) if after > before) or (1,)


def plain_mode(mode: str) -> str:
    """Normalizes a mode: '4x2' and IBM's 'b:4x2' become 'x:4x2'; others are unchanged."""
    match = _FORCED.fullmatch(mode)
    return f"x:{match[1]}" if match else mode


def parse_mode(mode: str, hosts: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (dims, group) of `mode` for ranks on `hosts` (the host index of each rank).

    'p' follows the hosts: ranks of one host share memory. 'x:LxH' or 'x:LxHxR' forces a box, fastest dimension first:
    each L consecutive ranks share memory, and the other dimensions use MPI even inside a host. The prefix may be left
    out, and IBM's letters (p, r, b, n, m and c) mean x.

    Raises:
        ConfigError: an invalid mode, the product of the dimensions is not the number of ranks, or ranks that would
            share memory are on different hosts.
    """
    size = len(hosts)
    if mode == "p":
        group = tuple(hosts.index(host) for host in hosts)
        ranks_of_hosts = {hosts.count(host) for host in hosts}
        return (ranks_of_hosts.pop(), len(set(hosts))) if len(ranks_of_hosts) == 1 else (), group

    match = _FORCED.fullmatch(mode)
    dims = tuple(int(word) for word in match[1].split("x")) if match else ()
    if not dims or min(dims) < 1:
        raise ConfigError(
            "mode must be 'p', or dimensions of 1 or more such as 'x:2x4' (ranks that share memory first). "
            f"Received: mode={mode!r}. Use 'p' to let keras_ddl choose."
        )
    product = math.prod(dims)
    if product != size:
        raise ConfigError(
            f"mode: the product of the dimensions must equal the number of ranks ({size}). Received: mode={mode!r} "
            f"(product {product}). Use 'p' to let keras_ddl choose."
        )
    length = dims[0]
    group = tuple(rank - rank % length for rank in range(size))
    for rank, leader in enumerate(group):
        if hosts[rank] != hosts[leader]:
            raise ConfigError(
                f"mode: every {length} consecutive ranks must run on one host, because they share memory. "
                f"Received: mode={mode!r}, but rank {leader} is on host {hosts[leader]} and rank {rank} on host "
                f"{hosts[rank]}. Place ranks host by host, choose a smaller first dimension, or use 'p'."
            )
    return dims, group
