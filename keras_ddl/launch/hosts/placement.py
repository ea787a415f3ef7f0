"""Chooses the number of ranks and the hosts of an attempt from the command line or a discovery script."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from keras_ddl.errors import ConfigError, LaunchError
from keras_ddl.launch.hosts import Host, hostfile, parse_hosts

_SCRIPT_SECONDS = 60.0


@dataclass(frozen=True)
class Discovery:
    """A command that prints the available hosts, one per line, as host:slots; `slots` for lines without a number."""

    command: str
    slots: int = 1

    def hosts(self, stopped: Callable[[], bool] = lambda: False) -> tuple[Host, ...]:
        """Runs the command and returns the hosts that it prints; if `stopped()` becomes true, kills it and returns ().

        Raises: LaunchError: it cannot be run, fails, takes longer than a minute, or prints something else.
        """
        try:
            process = subprocess.Popen(
                shlex.split(self.command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except (OSError, ValueError) as error:
            raise self._failure(f"it cannot be run: {error}") from None
        deadline = time.monotonic() + _SCRIPT_SECONDS
        with process:
            while True:
                try:
                    out, err = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    if stopped() or time.monotonic() > deadline:
                        process.kill()
                        if stopped():
                            return ()
                        raise self._failure(f"it has not ended after {_SCRIPT_SECONDS:g} s") from None
        if process.returncode != 0:
            stderr = err.decode(errors="replace").strip()[-500:]
            raise self._failure(f"it ended with status {process.returncode}, and stderr {stderr!r}")
        lines = [line.strip() for line in out.decode(errors="replace").splitlines() if line.strip()]
        try:
            return parse_hosts(",".join(x if ":" in x else f"{x}:{self.slots}" for x in lines)) if lines else ()
        except ConfigError as error:
            raise self._failure(str(error)) from None

    def _failure(self, what: str) -> LaunchError:
        return LaunchError(
            "The host discovery script must be executable, end with status 0 and print one line host:slots for each "
            f"host. Received: {self.command!r}: {what}. Run it by hand."
        )


class HostFile:
    """A file that names the hosts of a job, and may change. `slots`: for lines without a number."""

    def __init__(self, path: str, slots: int | None = None) -> None:
        self.path, self._slots = path, slots

    def hosts(self, stopped: Callable[[], bool] = lambda: False) -> tuple[Host, ...]:
        """Returns the hosts that the file names now. Raises: LaunchError: it cannot be read, or names no host."""
        del stopped  # it takes no time
        try:
            return parse_hosts(hostfile.read(self.path, self._slots))
        except (ConfigError, OSError) as error:
            raise LaunchError(f"{self.path}: {error}") from None


@dataclass
class Placement:
    """Chooses the number of ranks and the hosts of each attempt.

    Attributes:
        wanted: ranks of the first attempt; None: as many as the hosts have slots for.
        min_ranks, max_ranks: bounds for later attempts; None: `wanted`, or the number of the first attempt.
        fixed: the hosts of the command line; empty: this host, or the hosts of the resource manager.
        discovery: a script that names the hosts instead.
        lost: names of lost hosts, which are skipped as long as the others have enough slots.
        order: names of all hosts so far; they keep this order even if a script prints them in another one.
    """

    wanted: int | None
    fixed: tuple[Host, ...] = ()
    discovery: Discovery | None = None
    min_ranks: int | None = None
    max_ranks: int | None = None
    lost: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises: ConfigError: hosts are named twice."""
        if self.fixed and self.discovery is not None:
            raise ConfigError(
                "Hosts must be either listed or discovered, not both. Received: hosts "
                f"{[host.name for host in self.fixed]} and the script {self.discovery.command!r}. Leave out one of "
                "them."
            )

    def first(self, hosts: Sequence[Host]) -> tuple[int, tuple[Host, ...]] | None:
        """Returns (ranks, hosts) of the first attempt on `hosts`; None: they do not have enough slots yet."""
        slots = _slots(hosts)
        if slots < max(self.wanted or self.min_ranks or 1, 1):
            return None
        ranks = min(slots, self.max_ranks or self.wanted or slots)
        self.min_ranks = self.min_ranks or self.wanted or ranks
        self.max_ranks = self.max_ranks or self.wanted
        return self._chosen(ranks, hosts)

    def later(self, hosts: Sequence[Host]) -> tuple[int, tuple[Host, ...]] | None:
        """Returns (ranks, hosts) of a later attempt; None: the hosts do not have enough slots."""
        assert self.min_ranks is not None
        names = {host.name for host in hosts}
        self.lost &= names  # a host that was removed and is named again counts as available
        places = {name: place for place, name in enumerate(self.order)}
        hosts = sorted(hosts, key=lambda host: places.get(host.name, len(places)))
        for some in ([host for host in hosts if host.name not in self.lost], hosts):
            slots = _slots(some)
            if slots >= self.min_ranks:
                return self._chosen(min(slots, self.max_ranks or slots), some)
        return None

    def would_change(self, ranks: int, hosts: Sequence[Host], now: Sequence[Host]) -> bool:
        """Whether `later(now)` differs from `ranks` on `hosts`, or would find too few slots."""
        placed = replace(self, lost=set(self.lost), order=list(self.order)).later(now)
        return placed is None or ranks_by_host(*placed) != ranks_by_host(ranks, hosts)

    def _chosen(self, ranks: int, hosts: Sequence[Host]) -> tuple[int, tuple[Host, ...]]:
        self.order += [host.name for host in hosts if host.name not in self.order]
        return ranks, tuple(hosts)


def _slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)


def ranks_by_host(ranks: int, hosts: Sequence[Host]) -> dict[str, int]:
    """Returns the number of ranks on each host that has any."""
    names = [host_of_rank(hosts, rank) for rank in range(ranks)]
    return {name: names.count(name) for name in names if name is not None}


def host_of_rank(hosts: Sequence[Host], rank: int) -> str | None:
    """Returns the name of the host that a rank was started on (ranks fill one host after the other); None: unknown."""
    for host in hosts:
        if rank < host.slots:
            return host.name
        rank -= host.slots
    return None
