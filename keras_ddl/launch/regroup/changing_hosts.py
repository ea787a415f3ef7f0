"""Makes a running job follow its host file (`keras-ddl run --hostfile FILE -np MIN:MAX`).

New processes are started on hosts with free slots; they run the script and become ranks in the middle of `fit`. Ranks
whose slots are gone leave between two steps. Neither case loses work, so no rank has to wait.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from keras_ddl.launch.hosts import Host
from keras_ddl.launch.hosts.host_plan import MAX_LOSSES, HostPlan

if TYPE_CHECKING:
    from keras_ddl.launch.outcome import RankOutcome
    from keras_ddl.launch.rank_link import RankLink
    from keras_ddl.launch.regroup.regrouping import Regrouping


class JobWithRanks(Protocol):
    """The launcher's side of a running job (supervisor.py)."""

    links: list[RankLink]

    def add_link(self) -> None: ...
    def count(self, link: RankLink) -> None: ...
    def start_on_host(self, message: dict[str, Any]) -> None: ...
    def say(self, text: str) -> None: ...


class ChangingHosts:
    """Makes one job follow its host file. The launcher's loop calls all methods but `notify`."""

    def __init__(self, path: str, plan: HostPlan, regrouping: Regrouping, job: JobWithRanks, patience: float) -> None:
        """
        Args:
            path: path of the host file, for messages.
            patience: seconds within which a started process must connect.
        """
        self.plan = plan
        self._name, self._regrouping, self._job = Path(path).name, regrouping, job
        self._patience = patience
        self._changed: tuple[Host, ...] | None = None
        self._expected: dict[int, float] = {}  # newcomers that have not connected -> until when
        self._given_up: set[str] = set()  # hosts already reported as having lost too many ranks
        self._is_ending = False

    def differs(self, hosts: tuple[Host, ...]) -> bool:
        """Whether `hosts` differ from the job's current hosts."""
        return set(hosts) != set(self._changed or self.plan.hosts)

    def notify(self, hosts: tuple[Host, ...]) -> None:
        """Records that the file now names `hosts`. May be called from another thread."""
        self._changed = hosts

    def connected(self, rank: int) -> None:
        self._expected.pop(rank, None)

    def ended(self, outcome: RankOutcome) -> None:
        """Handles the end of a process."""
        rank, host = outcome.rank, self.plan.host_of(outcome.rank)
        is_lost = outcome.is_lost and not outcome.gives_up
        self.plan.end(rank, is_lost=is_lost, has_reported=outcome.status is not None)
        self._expected.pop(rank, None)
        if outcome.job_continues or host is None:
            return  # it has left, or the launcher gave it up
        if rank in self._regrouping.membership.members and not outcome.gives_up:
            self._is_ending |= not is_lost
        elif not is_lost and self.plan.takes_newcomers:  # more newcomers would fail in the same way
            self.plan.takes_newcomers = False
            self._job.say(f"no more ranks are started until {self._name} changes.")
        if self.plan.is_exhausted(host) and host not in self._given_up:
            self._given_up.add(host)
            self._job.say(f"host {host} gets no more ranks: {MAX_LOSSES} of its ranks were lost.")

    def tick(self) -> None:
        """Starts the processes that the hosts have slots for, and asks ranks without a slot to leave."""
        if self._is_ending:
            return
        if self._changed is not None:
            hosts, self._changed = self._changed, None
            self.plan.change(hosts)
            self._given_up &= {host.name for host in hosts}
            self._job.say(f"{self._name} has changed: {','.join(f'{h.name}:{h.slots}' for h in hosts)}.")
        members = self._regrouping.membership.members
        self.plan.spares = set(self._regrouping.spares)
        for rank in self.plan.unneeded(members):
            self.give_up(rank, f"no room for it in {self._name}")
        for name, ranks in self.plan.start(len(self._job.links)):
            self._start(name, ranks)
        self._regrouping.ask_to_leave(self.plan.surplus(members), f"no room for it in {self._name}")
        for rank in [rank for rank, until in self._expected.items() if time.monotonic() > until]:
            self._lose_host(self.plan.host_of(rank), f"it has not connected within {self._patience:g} s")

    def refuse(self, rank: int, why: str) -> None:
        """Ends a newcomer that has just connected, because its host cannot run ranks of the job."""
        if (host := self.plan.host_of(rank)) is not None:
            self.plan.lose_host(host)
        self.give_up(rank, why)

    def give_up(self, rank: int, why: str) -> None:
        """Ends a spare or newcomer."""
        link = self._job.links[rank]
        if link.outcome.job_continues:
            return  # it is already ending
        self._job.say(f"rank {rank} ends before it has joined: {why}.")
        link.outcome.job_continues = True
        link.stop(signal.SIGKILL, 0.0)
        if link.channel is not None and not link.started:
            link.channel.close()  # its wrapper ends
        if link.is_missing:
            link.lose()
            self._job.count(link)

    def _start(self, name: str, ranks: list[int]) -> None:
        for _ in ranks:
            self._job.add_link()
        self._expected.update(dict.fromkeys(ranks, time.monotonic() + self._patience))
        local_ranks, local_size = self.plan.local_places(ranks)
        message = {"host": name, "first": ranks[0], "local_ranks": local_ranks, "local_size": local_size}
        self._job.start_on_host(message)
        what = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        self._job.say(f"{what} started on host {name} and will join the others.")

    def not_started(self, host: str, why: str) -> None:
        """Handles the failure to start processes on a host."""
        self._lose_host(host, why)

    def _lose_host(self, name: str | None, why: str) -> None:
        if name is None:
            return  # already recorded as lost
        self.plan.lose_host(name)
        for rank in [rank for rank in self._expected if self.plan.host_of(rank) == name]:
            self.give_up(rank, why)
