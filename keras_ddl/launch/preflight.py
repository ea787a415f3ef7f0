"""Checks before the programs start: that hosts can be reached, and that they are alike. It adds no time.

The wrappers of the ranks report facts about their hosts in their first message; programs start when all have reported.
While mpirun starts, hosts without a connected rank are checked for reachability.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_ddl import config
from keras_ddl.errors import LaunchError
from keras_ddl.launch import host_facts, masking
from keras_ddl.launch.finding import Finding, Severity
from keras_ddl.launch.job import Job
from keras_ddl.launch.mpirun import Host
from keras_ddl.launch.mpirun_process import MpirunProcess
from keras_ddl.launch.placement import host_of_rank
from keras_ddl.launch.rank_link import RankLink

_SECONDS = 5.0
_SUBJECT = "reachable"
# Parts of settings by which mpirun reaches hosts in another way than by the ssh in PATH.
_OTHER_WAYS = ("plm", "launcher", "bootstrap", "rsh")


def by_ssh(mpi_args: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether mpirun probably starts its daemons by the ssh in PATH."""
    variables = [name.lower() for name in environ if name.startswith(("OMPI_MCA_", "PRTE_MCA_", "HYDRA_", "I_MPI_"))]
    words = [*map(str.lower, mpi_args), *variables]
    return not any(way in word for word in words for way in _OTHER_WAYS) and shutil.which("ssh") is not None


class Reach:
    """Connects to each host once, in threads that the constructor starts."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._findings: dict[str, Finding] = {}
        here = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
        names = [host.name for host in hosts if host.name not in here]
        self._threads = [
            threading.Thread(target=self._check, args=(name,), name="keras_ddl-reach", daemon=True) for name in names
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Waits for the checks, at most some seconds."""
        for thread in self._threads:
            thread.join(2 * _SECONDS)

    def findings(self) -> dict[str, Finding]:
        return dict(self._findings)

    def _check(self, name: str) -> None:
        where = ssh_address(name)
        if where is None:
            return
        try:
            socket.create_connection(where, timeout=_SECONDS).close()
            return
        except socket.gaierror as error:
            problem, remedy = (
                f"its name cannot be resolved ({error.strerror})",
                "Correct the name, or add it to the DNS.",
            )
        except ConnectionRefusedError:
            problem, remedy = f"nothing listens at its port {where[1]}", "Start sshd there, or set the port for ssh."
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else error.strerror
            problem, remedy = (
                f"{why} from its port {where[1]} within {_SECONDS:g} s",
                "Is it up? Is a firewall between?",
            )
        expected = "an ssh server, by which ranks are started"
        self._findings[name] = Finding(
            Severity.ERROR, _SUBJECT, f"{problem} (expected: {expected})", f"{remedy} Try: ssh {name} true.", name
        )


def ssh_address(name: str) -> tuple[str, int] | None:
    """Returns host and port that ssh would connect to; None: it uses a proxy, or cannot be queried."""
    try:
        done = subprocess.run(
            ["ssh", "-G", name], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    options = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    proxied = any(options.get(name, "none") != "none" for name in ("proxyjump", "proxycommand"))
    if done.returncode != 0 or proxied or not options.get("port", "").isdigit() or not options.get("hostname"):
        return None
    return options["hostname"], int(options["port"])


class Preflight:
    """The checks of one job. On a single host, only /dev/shm is checked."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._is_on = config.get("PREFLIGHT")
        self._facts: dict[int, dict[str, Any]] = {}  # by rank
        self._answered: set[str] = set()  # names in --hosts
        is_by_ssh = self._is_on and job.hosts and by_ssh(job.mpi_args, os.environ) and not config.is_set("SSH")
        self._reach = Reach(job.hosts if is_by_ssh else ())

    @property
    def holds_start(self) -> bool:
        return bool(self._is_on) and self._job.several_hosts

    def take(self, rank: int, hello: dict[str, Any]) -> None:
        """Takes the first message of a rank's wrapper."""
        name = host_of_rank(self._job.hosts, rank)  # of a newcomer another one, which is not looked for
        if name is not None:
            self._answered.add(name)
        if "facts" in hello:
            self._facts[rank] = hello["facts"]

    def unreachable(self, *, at_end: bool = False) -> str | None:
        """Returns the message about hosts that cannot be reached and have no connected rank; None without such hosts.

        `at_end`: mpirun has ended; waits for checks that still run.
        """
        if at_end:
            self._reach.wait()
        findings = [finding for name, finding in self._reach.findings().items() if name not in self._answered]
        return _refusal(findings) if findings else None

    def problem_of(self, rank: int) -> str | None:
        """Returns why a newcomer's host cannot have ranks of the job; None: it can."""
        others, own = self._facts[min(self._facts)], self._facts[rank]
        findings = host_facts.compare([others, own])
        if others["has_rack"] != own["has_rack"]:
            return f"KERAS_DDL_RACK must be set on all hosts or on none; {own['host']} is not like the others"
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

    def check_started(self, links: Sequence[RankLink], starter: MpirunProcess) -> None:
        """At the end of the job. Raises: LaunchError: not all of its ranks had been started."""
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
        "The hosts of a job must be reachable and have the same versions. Received:\n"
        f"{lines}\nKERAS_DDL_PREFLIGHT=0 starts the ranks without these checks."
    )
