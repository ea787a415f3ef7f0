"""What is checked before the programs start: that hosts answer, and that they are alike. Costs no time of its own.

The wrappers of the ranks tell what their hosts have in their first message; the programs start when all have told.
Meanwhile mpirun starts, hosts that named no rank yet are asked whether they can be reached at all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import config
from keras_ddl.launch import host_facts, reach
from keras_ddl.launch.finding import Finding, Severity
from keras_ddl.launch.job import Job
from keras_ddl.launch.placement import host_of_rank


class Preflight:
    """The checks of one job. On one host only its /dev/shm is looked at: the rest is alike."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._is_on = config.get("PREFLIGHT")
        self._told: dict[int, dict[str, Any]] = {}  # by rank: they come in any order
        self._answered: set[str] = set()  # names in --hosts
        ask = self._is_on and job.hosts and reach.by_ssh(job.mpi_args, os.environ)
        self._reach = reach.Reach(job.hosts if ask else ())

    @property
    def holds_start(self) -> bool:
        """Whether programs start only when all ranks have told."""
        return bool(self._is_on) and self._job.several_hosts

    def take(self, rank: int, hello: dict[str, Any]) -> None:
        """Takes the first message of a rank's wrapper."""
        name = host_of_rank(self._job.hosts, rank)
        if name is not None:
            self._answered.add(name)
        if "facts" in hello:
            self._told[rank] = hello["facts"]

    def unreachable(self, *, at_end: bool = False) -> str | None:
        """Returns the text about hosts that cannot be reached and of which no rank has come; None where all may come.

        `at_end`: mpirun has ended: waits for the answers.
        """
        if at_end:
            self._reach.wait()
        found = [finding for name, finding in self._reach.findings().items() if name not in self._answered]
        return _refusal(found) if found else None

    def problems(self) -> str | None:
        """Says what is to be warned of. Returns the text about hosts on which the job cannot start, None without."""
        if not self._is_on:
            return None
        if self._told:
            findings = host_facts.compare([self._told[rank] for rank in sorted(self._told)])
        else:
            own = {"host": socket.gethostname(), "shm": host_facts.free_shared_memory()}
            findings = list(host_facts.check_shared_memory([own]))
        for finding in findings:
            if finding.severity is not Severity.ERROR:
                self._say(f"warning: {_line(finding)}")
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        return _refusal(errors) if errors else None


def _line(finding: Finding) -> str:
    where = f" on host {finding.host}" if finding.host else ""
    return f"{finding.subject}{where}: {finding.found}. {finding.remedy}"


def _refusal(findings: Sequence[Finding]) -> str:
    lines = "\n".join(f"    {_line(finding)}" for finding in findings)
    return (
        "The hosts of a job must be reachable and have the same versions. Received:\n"
        f"{lines}\nKERAS_DDL_PREFLIGHT=0 starts the ranks without these checks."
    )
