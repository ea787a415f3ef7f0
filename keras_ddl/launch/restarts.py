"""Restarts a job when it fails: each attempt is a separate job with new processes.

A failed attempt is ended and cleaned up like any job; then the next one begins. A directory on each host survives
(`JobSpec.kept`), which the ranks see as KERAS_DDL_JOB_DIR. docs/launch.md describes it for users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import time
from collections.abc import Sequence

from keras_ddl.errors import ConfigError, LaunchError
from keras_ddl.launch.hosts import Host
from keras_ddl.launch.hosts.host_watch import HostWatch
from keras_ddl.launch.hosts.placement import Placement, host_of_rank, ranks_by_host
from keras_ddl.launch.interrupts import Interrupts
from keras_ddl.launch.job import JobResult, JobSpec, new_id
from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.launch.output import masking
from keras_ddl.launch.output.screen import Screen
from keras_ddl.launch.rank import job_folder
from keras_ddl.launch.supervisor import Supervisor
from keras_ddl.launch.watchers import Watchers
from keras_ddl.link.loop import READ, serve
from keras_ddl.link.program import RESTART_STATUS

# Two equal failures in a row, both this soon after the start, are caused by the program, not by the machine.
_EARLY_SECONDS = 60.0
# Signals from outside: from another process, the kernel when memory runs out, or a resource manager.
_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Exit statuses of wrong arguments (argparse, click, Python itself), and of a program that cannot be executed.
_USAGE_STATUSES = (2, 126, 127)
_PAUSE_AFTER_NO_START_SECONDS = 5.0
_POLL_HOSTS_SECONDS = 1.0


class RestartLoop:
    """Runs the attempts of one job. Call `run` only once."""

    def __init__(
        self,
        job: JobSpec,
        screen: Screen,
        *,
        limit: int = 0,
        placement: Placement | None = None,
        hosts_seconds: float = 600.0,
        stdin: int | None = None,
        terminals: dict[str, int] | None = None,
        watchers: Watchers | None = None,
    ) -> None:
        """
        Args:
            job: the first attempt; if a script names the hosts, the hosts and the number of ranks are chosen later.
            limit: maximum number of restarts.
            hosts_seconds: how long to wait for hosts with enough slots.
            stdin, terminals: as for Supervisor.
            watchers: watchers of all attempts.

        Raises: ConfigError: `limit` is not a whole number of 0 or more.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ConfigError(f"restarts must be a whole number, 0 or more. Received: restarts={limit!r}.")
        self._job, self._screen, self._limit = job, screen, limit
        self._placement = placement or Placement(job.num_ranks, job.hosts)
        self._hosts_seconds, self._stdin, self._terminals = hosts_seconds, stdin, terminals
        self._watchers = watchers or Watchers()
        self._attempt_number = 0  # attempts before this one
        self._failures = 0  # failed attempts before this one
        self._hosts_change_announced = False  # the ranks know that the hosts have changed
        self._restart_requested = False  # the ranks exited because the hosts have changed
        self._began = self._attempt_began = time.monotonic()
        self._hosts: tuple[Host, ...] = ()  # hosts of this attempt
        self._num_ranks = job.num_ranks
        self._restart_reason = ""  # why the next attempt begins
        self._early_failure: tuple[int, str] | None = None
        self._will_restart = False

    def run(self, signals: tuple[signal.Signals, ...]) -> JobResult:
        """Runs the job until an attempt succeeds or no attempt is left. `signals`: signals that end it.

        Returns the result of the last attempt; messages about earlier ones have been shown.
        Raises: LaunchError: the first attempt could not be started.
        """
        if self._limit == 0 and self._placement.discovery is None:
            return self._attempt(self._job, signals)
        kept = new_id()
        self._job = dataclasses.replace(self._job, kept=kept)
        try:
            with Interrupts(signals, lambda: None) as self._interrupts:
                return self._run(signals)
        finally:
            shutil.rmtree(job_folder.on_this_host(kept), ignore_errors=True)

    def _run(self, signals: tuple[signal.Signals, ...]) -> JobResult:
        """Starts the job, and starts it again as long as restarts are due. Returns the result of the last attempt."""
        result = JobResult([])
        while True:
            where = self._wait_for_hosts()
            if where is None:
                return self._stopped_between(result)
            job = self._next_attempt(*where)
            if self._attempt_number:
                hosts = f" on {_hosts_text(job.hosts)}" if job.hosts else ""
                ranks = "1 rank" if job.num_ranks == 1 else f"{job.num_ranks} ranks"
                which = "started again" if self._restart_requested else f"restart {self._failures} of {self._limit}"
                self._say(f"{which}, with {ranks}{hosts} ({self._restart_reason})")
                self._watchers.event("restart", restart=self._attempt_number, reason=self._restart_reason)
            try:
                result = self._attempt(job, signals)
            except LaunchError as error:
                if not self._will_restart:
                    raise
                self._show(f"keras-ddl: LaunchError: {error}\n")
                self._restart_reason = "it could not be started"
                self._wait(_PAUSE_AFTER_NO_START_SECONDS)
            else:
                if not self._will_restart:
                    return result
                if not self._restart_requested:
                    self._show(result.failure_text)
            self._attempt_number += 1
            self._failures += not self._restart_requested

    def _attempt(self, job: JobSpec, signals: tuple[signal.Signals, ...]) -> JobResult:
        """Runs the job once, and meanwhile watches for hosts that come or go, if a file or a script lists them."""
        self._attempt_began, self._will_restart, self._num_ranks = time.monotonic(), False, job.num_ranks
        self._watchers.start(
            restart=self._attempt_number,
            ranks=job.num_ranks,
            spares=job.spares,
            hosts=ranks_by_host(job.num_ranks, job.hosts) or None,
            starter=job.starter,
            command=masking.hidden(job.program),
        )
        supervisor = Supervisor(
            job,
            self._screen,
            stdin=self._stdin,
            terminals=self._terminals,
            will_restart=self._decide_restart,
            watchers=self._watchers,
        )
        self._hosts_change_announced = self._restart_requested = False
        if supervisor.changing is not None and job.hostfile is not None:
            with HostWatch(job.hostfile, supervisor.changing.differs, supervisor.changing.notify):
                return supervisor.run(signals)
        discovery = self._placement.discovery
        if discovery is None:
            return supervisor.run(signals)

        def differs(hosts: tuple[Host, ...]) -> bool:
            return not self._hosts_change_announced and self._placement.would_change(job.num_ranks, job.hosts, hosts)

        def announce(_: tuple[Host, ...]) -> None:
            self._hosts_change_announced = True
            supervisor.notify_hosts_changed()

        with HostWatch(discovery, differs, announce):
            return supervisor.run(signals)

    def _next_attempt(self, num_ranks: int, hosts: tuple[Host, ...]) -> JobSpec:
        """Returns the job of the next attempt."""
        job, number = self._job, self._attempt_number
        output_dir = job.output_dir
        if output_dir is not None and number:
            output_dir /= f"restart-{number}"
        room = sum(host.slots for host in hosts) - num_ranks if hosts else job.spares
        return dataclasses.replace(
            job,
            id=new_id(),
            num_ranks=num_ranks,
            spares=min(job.spares, room),
            hosts=hosts,
            hostfile=job.hostfile if num_ranks > 1 else None,
            environment={**job.environment, "KERAS_DDL_RESTART": str(number)},
            output_dir=output_dir,
            seconds_spent=time.monotonic() - self._began,
        )

    # ---- after an attempt ----------------------------------------------------------------------------------------

    def _decide_restart(self, result: JobResult) -> bool:
        reason = self._reason_not_to_restart(result)
        if reason:
            self._say(reason)
        self._will_restart = reason is None
        return self._will_restart

    def _reason_not_to_restart(self, result: JobResult) -> str | None:
        """Returns why no other attempt follows ("" if the reason is obvious); None if one follows."""
        if result.ok or result.refused or result.signal is not None or result.timed_out:
            return ""
        first = result.first_failure
        if first is not None and first.status == RESTART_STATUS and self._hosts_change_announced:
            self._restart_requested, self._restart_reason = True, "the hosts have changed"
            return None
        if self._limit == 0:
            return ""
        if first is not None and first.stopped_by is None and first.status in _USAGE_STATUSES:
            return f"not started again: exit status {first.status} means that the command cannot work."
        if self._failures == self._limit:
            return f"not started again: this was restart {self._failures} of {self._limit}."
        if not all(outcome.host for outcome in result.outcomes[: self._num_ranks]):
            return "" if self._attempt_number == 0 else None
        early = self._early_failure
        self._early_failure = None
        if first is not None and first.status is not None and not first.is_consequence:
            is_own = first.report is not None or first.status > 0 or -first.status not in _EXTERNAL_SIGNALS
            is_own = is_own and first.status != RESTART_STATUS
            if is_own and time.monotonic() - self._attempt_began < _EARLY_SECONDS:
                self._early_failure = first.rank, first.describe()
        if early is not None and early == self._early_failure:
            return (
                f"not started again: rank {early[0]} has failed in the same way twice, each time within "
                f"{_EARLY_SECONDS:g} s of the start."
            )
        self._restart_reason = f"{result.starter} ended" if first is None else f"rank {first.rank}: {first.describe()}"
        if result.asks_to_restart:
            self._restart_reason = f"the ranks ended with status {RESTART_STATUS}"
        self._placement.lost |= _lost_hosts(self._hosts, result.outcomes[: self._num_ranks])
        return None

    # ---- between attempts ----------------------------------------------------------------------------------------

    def _wait_for_hosts(self) -> tuple[int, tuple[Host, ...]] | None:
        """Returns (ranks, hosts) of the next attempt; None: the hosts have too few slots, or the job must end.

        Raises: LaunchError: the first attempt has no hosts.
        """
        deadline = time.monotonic() + self._hosts_seconds
        placement, warned = self._placement, False
        while True:
            problem = "there are no hosts"
            hosts: Sequence[Host] = placement.fixed
            if self._job.hostfile is not None and self._attempt_number:
                with contextlib.suppress(LaunchError):
                    hosts = self._job.hostfile.hosts()
            if placement.discovery is not None:
                try:
                    hosts = placement.discovery.hosts(self._should_stop)
                    problem = f"the available hosts are {_hosts_text(hosts) or 'none'}"
                except LaunchError as error:
                    if self._attempt_number == 0 and not warned:
                        raise
                    problem = str(error)
            if self._should_stop():
                return None
            if placement.discovery is None and not placement.fixed:
                return self._job.num_ranks, ()
            placed = placement.later(hosts) if self._attempt_number else placement.first(hosts)
            if placed is not None:
                self._hosts = placed[1]
                return placed
            needed = placement.min_ranks if self._attempt_number else placement.wanted or placement.min_ranks or 1
            if time.monotonic() >= deadline:
                text = f"for {self._hosts_seconds:g} s the hosts had no room for {needed} rank(s): {problem}"
                if self._attempt_number == 0:
                    remedy = "To wait longer, write hosts-timeout = SECONDS in the file of --config."
                    raise LaunchError(f"A job needs hosts. Received: {text}. {remedy}")
                self._say(f"not started again: {text}.")
                return None
            if not warned:
                warned = True
                self._say(f"waiting for hosts with room for {needed} rank(s): {problem}.")
            self._wait(_POLL_HOSTS_SECONDS)

    def _should_stop(self) -> bool:
        return bool(self._interrupts.received) or self._screen.lost is not None or self._is_out_of_time()

    def _is_out_of_time(self) -> bool:
        timeout = self._job.timeout
        return timeout is not None and time.monotonic() - self._began >= timeout

    def _wait(self, seconds: float) -> None:
        if not self._should_stop():
            serve(seconds, [(self._interrupts.fileno(), READ, bool)])

    def _stopped_between(self, result: JobResult) -> JobResult:
        """Returns the result of a job that ended while no rank ran."""
        if received := self._interrupts.take():
            result.signal = received[0]
            self._say(f"{signal.Signals(received[0]).name}: not started again.")
        elif self._is_out_of_time():
            result.timed_out = True
            self._say(f"the job did not end within {self._job.timeout:g} s and is not started again.")
        return result

    def _say(self, text: str) -> None:
        self._show(f"keras-ddl: {text}\n")

    def _show(self, text: str) -> None:
        self._screen.write_lines("err", text.encode())


def _lost_hosts(hosts: Sequence[Host], outcomes: Sequence[RankOutcome]) -> set[str]:
    """Returns the hosts on which no rank reported its end, if ranks on other hosts did."""
    reported: dict[str, bool] = {}
    for outcome in outcomes:
        host = host_of_rank(hosts, outcome.rank)
        if host is not None:
            reported[host] = reported.get(host, False) or outcome.status is not None
    return {host for host, any_rank in reported.items() if not any_rank} if any(reported.values()) else set()


def _hosts_text(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)
