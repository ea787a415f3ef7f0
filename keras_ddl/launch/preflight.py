"""Before the programs start, checks that hosts can be reached and have equal versions; it causes no delay.

The wrappers of the ranks report facts about their hosts in their first message; programs start when all have reported.
While mpirun starts, hosts without a connected rank are checked for reachability.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import config
from keras_ddl.errors import LaunchError
from keras_ddl.launch.checks import host_facts, reach
from keras_ddl.launch.checks.finding import Finding, Severity
from keras_ddl.launch.hosts.placement import host_of_rank
from keras_ddl.launch.job import JobSpec
from keras_ddl.launch.output import masking
from keras_ddl.launch.rank_link import RankLink
from keras_ddl.launch.starters.starter_process import StarterProcess


class Preflight:
    """The checks of one job. On a single host it checks only /dev/shm."""

    def __init__(self, job: JobSpec, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._is_on = config.get("PREFLIGHT")
        self._facts: dict[int, dict[str, Any]] = {}  # by rank
        self._answered: set[str] = set()  # names in --hosts
        by_ssh = self._is_on and job.hosts and reach.by_ssh(job.mpi_args, os.environ) and not config.is_set("SSH")
        self._reach = reach.Reach(job.hosts if by_ssh else ())

    @property
    def holds_start(self) -> bool:
        return bool(self._is_on) and self._job.several_hosts

    def take(self, rank: int, hello: dict[str, Any]) -> None:
        """Takes the first message of a rank's wrapper."""
        name = host_of_rank(self._job.hosts, rank)  # a newcomer's host is a different one, which is not checked
        if name is not None:
            self._answered.add(name)
        if "facts" in hello:
            self._facts[rank] = hello["facts"]

    def unreachable(self, *, at_end: bool = False) -> str | None:
        """Returns the message about hosts that cannot be reached and have no connected rank; None without such hosts.

        `at_end`: mpirun has ended, so wait for unfinished checks.
        """
        if at_end:
            self._reach.wait()
        findings = [finding for name, finding in self._reach.findings().items() if name not in self._answered]
        return _refusal(findings) if findings else None

    def problem_of(self, rank: int) -> str | None:
        """Returns why a newcomer's host cannot run ranks of the job; None if it can."""
        others, own = self._facts[min(self._facts)], self._facts[rank]
        findings = host_facts.compare([others, own])
        if others["has_rack"] != own["has_rack"]:
            return f"KERAS_DDL_RACK must be set on all hosts or on none; {own['host']} differs from the others"
        return "; ".join(_line(each) for each in findings if each.severity is Severity.ERROR) or None

    def problems(self) -> str | None:
        """Prints warnings. Returns the message about hosts on which the job cannot start; None without such hosts."""
        if not self._is_on:
            return None
        if self._facts:
            findings = host_facts.compare([self._facts[rank] for rank in sorted(self._facts)])
        else:
            own = {"host": socket.gethostname(), "shm": host_facts.free_shared_memory()}
            findings = list(host_facts.check_shared_memory([own]))
        for finding in findings:
            if finding.severity is not Severity.ERROR:
                self._say(f"warning: {_line(finding)}")
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        return _refusal(errors) if errors else None

    def check_started(self, links: Sequence[RankLink], starter: StarterProcess) -> None:
        """Called at the end of the job. Raises: LaunchError: some ranks were never started."""
        missing = [link.outcome.rank for link in links[: self._job.num_ranks] if link.is_missing]
        if not missing:
            return
        if (unreachable := self.unreachable(at_end=True)) is not None:
            raise LaunchError(unreachable)
        what = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing[:10]))}"
        raise LaunchError(
            f"All {self._job.num_ranks} ranks must be started and reach the launcher on {socket.gethostname()}. "
            f"Received: nothing from {what}; {self._job.starter} ended with status {starter.status} and output:"
            f"\n{starter.text.strip() or '(nothing)'}\nThe command was: {masking.shown(self._job.command())}"
        )


def _line(finding: Finding) -> str:
    where = f" on host {finding.host}" if finding.host else ""
    return f"{finding.subject}{where}: {finding.found}. {finding.remedy}"


def _refusal(findings: Sequence[Finding]) -> str:
    lines = "\n".join(f"    {_line(finding)}" for finding in findings)
    return (
        "The hosts of a job must be reachable by ssh and have the same versions. Received:\n"
        f"{lines}\nKERAS_DDL_PREFLIGHT=0 starts the ranks without these checks."
    )
