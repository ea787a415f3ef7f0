"""Tracks which ranks run on which host, and plans which ranks start or leave when the host file changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from keras_ddl.launch.hosts import Host

MAX_LOSSES = 3  # lost processes after which a host gets no replacements


class HostPlan:
    """The hosts of one job, and the job's living processes on each host.

    Args:
        hosts: hosts at the start; ranks fill one after the other.
        num_ranks: number of ranks at the start; spares follow them.
        min_ranks: number of ranks that stay, whatever the file says.
        max_ranks: upper limit on ranks; None: limited only by the hosts' slots.
    """

    def __init__(
        self, hosts: Sequence[Host], num_ranks: int, spares: int, min_ranks: int, max_ranks: int | None
    ) -> None:
        self._slots = {host.name: host.slots for host in hosts}
        names = [host.name for host in hosts for _ in range(host.slots)][: num_ranks + spares]
        self._host_of = dict(enumerate(names))  # host of each living process
        self._local_rank_of = {rank: names[:rank].count(name) for rank, name in enumerate(names)}
        self.spares = set(range(num_ranks, num_ranks + spares))  # living spares that have not started
        self._min_ranks, self._max_ranks = min_ranks, max_ranks
        self._gone: set[str] = set()  # hosts that were lost, or where nothing could be started
        self._losses: Counter[str] = Counter()
        self.takes_newcomers = True
        """Whether processes are started to replace lost ones, and on new hosts."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(Host(*each) for each in self._slots.items())

    def host_of(self, rank: int) -> str | None:
        """Returns the host of a living process, None if it has ended."""
        return self._host_of.get(rank)

    def local_places(self, ranks: Sequence[int]) -> tuple[list[int], int]:
        """Returns the local rank of each process, and how many processes its host may have."""
        return [self._local_rank_of[rank] for rank in ranks], self._slots[self._host_of[ranks[0]]]

    def change(self, hosts: Iterable[Host]) -> None:
        """Records that the file now names `hosts`."""
        slots = {host.name: host.slots for host in hosts}
        # Known hosts keep their places. A host that the file omitted for a while counts as new.
        order = [name for name in self._slots if name in slots] + [name for name in slots if name not in self._slots]
        self._gone &= slots.keys()
        for name in self._losses.keys() - slots.keys():
            del self._losses[name]
        self._slots = {name: slots[name] for name in order}
        self.takes_newcomers = True

    def end(self, rank: int, *, is_lost: bool, has_reported: bool) -> None:
        """Handles the end of a process. `is_lost`: ended from outside. `has_reported`: its wrapper reported the end."""
        name = self._host_of.pop(rank, None)
        self.spares.discard(rank)
        if name is None or not is_lost:
            return
        self._losses[name] += 1
        if not has_reported and name not in self._host_of.values():
            self._gone.add(name)

    def is_exhausted(self, name: str) -> bool:
        """Whether a host has lost too many ranks to get more."""
        return self._losses[name] >= MAX_LOSSES

    def lose_host(self, name: str) -> None:
        """Records that no process can be started on this host until the file omits it once."""
        self._gone.add(name)

    def surplus(self, members: Iterable[int]) -> list[int]:
        """Returns the members of the job that have no slot in the file, up to the number that may leave."""
        members = [rank for rank in members if rank in self._host_of]
        left, surplus = Counter(self._slots), list[int]()
        for rank in members:
            left[self._host_of[rank]] -= 1
            if left[self._host_of[rank]] < 0 and len(surplus) < len(members) - self._min_ranks:
                surplus.append(rank)
        return surplus

    def needless(self, members: Iterable[int]) -> list[int]:
        """Returns the spares and newcomers (not yet members) that have no slot in the file."""
        left, needless = Counter(self._slots), []
        for rank in members:
            left[self._host_of.get(rank, "")] -= 1
        for rank in sorted(self._host_of.keys() - set(members)):
            left[self._host_of[rank]] -= 1
            if left[self._host_of[rank]] < 0:
                needless.append(rank)
        return needless

    def start(self, first: int) -> list[tuple[str, list[int]]]:
        """Returns (host, ranks) for each host where processes start, numbered from `first`; counts them as living."""
        if not self.takes_newcomers:
            return []
        used = Counter(self._host_of.values())
        staying = sum(min(number, self._slots.get(name, 0)) for name, number in used.items()) - len(self.spares)
        missing = sum(self._slots.values()) if self._max_ranks is None else self._max_ranks - staying
        started = []
        for name, slots in self._slots.items():
            if name in self._gone or self.is_exhausted(name):
                continue
            ranks = list(range(first, first + max(0, min(slots - used[name], missing))))
            if ranks:
                started.append((name, ranks))
                for rank in ranks:
                    taken = {self._local_rank_of[each] for each, where in self._host_of.items() if where == name}
                    self._local_rank_of[rank] = next(each for each in range(slots + 1) if each not in taken)
                    self._host_of[rank] = name
                first += len(ranks)
                missing -= len(ranks)
        return started
