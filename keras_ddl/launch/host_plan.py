"""Which ranks of a job that goes on run on which host, and what is to change when its host file has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from keras_ddl.launch.mpirun import Host

MAX_LOSSES = 3  # of a host that still takes processes in place of lost ones


class HostPlan:
    """The hosts of one job, and its living processes on each.

    Args:
        hosts: at the start, which ranks fill one after the other. num_ranks: at the start; spares follow them.
        min_ranks: so many stay, whatever the file says. max_ranks: so many there may be; None: as many as hosts take.
    """

    def __init__(
        self, hosts: Sequence[Host], num_ranks: int, spares: int, min_ranks: int, max_ranks: int | None
    ) -> None:
        self._slots = {host.name: host.slots for host in hosts}
        names = [host.name for host in hosts for _ in range(host.slots)][: num_ranks + spares]
        self._host_of = dict(enumerate(names))  # of living processes
        self.spares = set(range(num_ranks, num_ranks + spares))  # of them, those that wait
        self._min_ranks, self._max_ranks = min_ranks, max_ranks
        self._gone: set[str] = set()  # hosts that were lost, or where nothing could be started
        self._losses: Counter[str] = Counter()
        self.takes_newcomers = True
        """Whether processes are started in place of lost ones, and on new hosts."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Those that the file names now."""
        return tuple(Host(*each) for each in self._slots.items())

    def host_of(self, rank: int) -> str | None:
        """Returns the host of a process that lives; None: it does not."""
        return self._host_of.get(rank)

    def change(self, hosts: Iterable[Host]) -> None:
        """The file names these hosts now."""
        slots = {host.name: host.slots for host in hosts}
        # They keep their places. One that the file has left out in between is as good as new.
        order = [name for name in self._slots if name in slots] + [name for name in slots if name not in self._slots]
        self._gone &= slots.keys()
        for name in self._losses.keys() - slots.keys():
            del self._losses[name]
        self._slots = {name: slots[name] for name in order}
        self.takes_newcomers = True

    def end(self, rank: int, *, is_lost: bool, has_reported: bool) -> None:
        """A process has ended. `is_lost`: from outside. `has_reported`: its wrapper has said how."""
        name = self._host_of.pop(rank, None)
        self.spares.discard(rank)
        if name is None or not is_lost:
            return
        self._losses[name] += 1
        if not has_reported and name not in self._host_of.values():
            self._gone.add(name)

    def is_exhausted(self, name: str) -> bool:
        """Whether so many of its ranks were lost that it gets no others."""
        return self._losses[name] >= MAX_LOSSES

    def lose_host(self, name: str) -> None:
        """Nothing can be started on this host, until the file has left it out."""
        self._gone.add(name)

    def surplus(self, members: Iterable[int]) -> list[int]:
        """Returns the members of the job that the file has no room for, as many as may leave together.

        Those of one host at a time, and one rank at a time where there is no other host: so the state that is in
        shards has a mirror on a rank that stays.
        """
        members = [rank for rank in members if rank in self._host_of]
        by_host: dict[str, list[int]] = {}
        for rank in members:
            by_host.setdefault(self._host_of[rank], []).append(rank)
        for name, ranks in by_host.items():
            surplus = ranks[self._slots.get(name, 0) :][: max(0, len(members) - self._min_ranks)]
            if surplus:
                return surplus if len(by_host) > 1 else surplus[-1:]
        return []

    def needless(self, members: Iterable[int]) -> list[int]:
        """Returns the spares and newcomers, no members yet, that the file has no room for."""
        left, needless = Counter(self._slots), []
        others = self._host_of.keys() - set(members)
        for rank, name in self._host_of.items():  # members first: they have the lower numbers
            left[name] -= 1
            if left[name] < 0 and rank in others:
                needless.append(rank)
        return needless

    def start(self, first: int) -> list[tuple[str, list[int]]]:
        """Returns (host, ranks) for each host where processes start, numbered from `first`; they live from now on."""
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
                self._host_of.update(dict.fromkeys(ranks, name))
                first += len(ranks)
                missing -= len(ranks)
        return started
