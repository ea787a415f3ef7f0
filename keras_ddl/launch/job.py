"""Specifies one job (`JobSpec`) and describes its result (`JobResult`); supervisor.py runs it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from keras_ddl import config
from keras_ddl.errors import ConfigError
from keras_ddl.launch.hosts import Host, parse_hosts
from keras_ddl.launch.hosts.placement import HostFile, ranks_by_host
from keras_ddl.launch.mpi import mpirun as mpirun_module
from keras_ddl.launch.mpi.mpirun import Mpirun
from keras_ddl.launch.outcome import (
    RESTART_STATUS,
    RankOutcome,
    explain,
    first_failure,
    resume_hint,
    status_text,
    vanished,
)
from keras_ddl.launch.rank import job_folder
from keras_ddl.launch.rank.rank_environment import python_path, tune_malloc
from keras_ddl.topology import parse_mode
from keras_ddl.topology.launcher import allocation_size

TIMEOUT_STATUS = 124  # as for timeout(1)


def new_id() -> str:
    """Returns a random text that nobody can guess, used to name directories (job_folder.py)."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class JobSpec:
    """A program to run on `num_ranks` ranks.

    Attributes:
        program: command line of every rank.
        environment: the program's environment; `make` fills it.
        mpirun: starts the ranks; None: the ranks need no MPI, and host_ranks.py starts them on each host.
        hosts: where to run; empty: this host, or the hosts of the resource manager.
        timeout: seconds after which the job is ended, None for never.
        grace: seconds between the signal that ends the ranks and SIGKILL; None: a few seconds.
        call: for keras_ddl.run, the content of every rank's KERAS_DDL_RUN_DIR/call.pickle; None for a program.
        output_dir: directory for each rank's output; None: it is not stored.
        seconds_spent: how much of the timeout earlier attempts used.
        min_ranks: the job continues after a loss while this many ranks are left (membership.py); None: it ends.
        spares: number of processes that can replace lost ranks; they are numbered after the ranks.
        hostfile: the file that names `hosts` and whose changes the job follows; None: the hosts stay the same.
        max_ranks: upper limit on ranks when the host file changes; None: limited only by its slots.
        kept: like `id`, for the directory that survives restarts (KERAS_DDL_JOB_DIR in the ranks); None: no directory.
        id: secret that determines the name of the job's directory on each host (job_folder.py).
    """

    program: tuple[str, ...]
    num_ranks: int
    mpirun: Mpirun | None
    environment: Mapping[str, str] = field(repr=False)
    hosts: tuple[Host, ...] = ()
    mpi_args: tuple[str, ...] = ()
    timeout: float | None = None
    grace: float | None = None
    call: bytes | None = field(default=None, repr=False)
    output_dir: Path | None = None
    seconds_spent: float = 0.0
    kept: str | None = field(default=None, repr=False)
    min_ranks: int | None = None
    spares: int = 0
    hostfile: HostFile | None = None
    max_ranks: int | None = None
    verbose: bool = False
    directory: str = field(default_factory=os.getcwd)
    id: str = field(default_factory=new_id, repr=False)

    @property
    def several_hosts(self) -> bool:
        """Whether ranks may run on other hosts than this one."""
        return bool(self.hosts) or mpirun_module.in_allocation(os.environ) or self._mpi_args_name_hosts

    @property
    def takes_newcomers(self) -> bool:
        """Whether processes may become ranks while the job runs."""
        return bool(self.spares or self.hostfile)

    @property
    def num_hosts(self) -> int:
        """The number of hosts on which a job without mpirun starts processes, now or later."""
        return len(ranks_by_host(self.num_ranks + self.spares, self.hosts)) + bool(self.hostfile)

    @property
    def _mpi_args_name_hosts(self) -> bool:
        return any("host" in word or word in ("-f", "-H", "-machinefile", "--machinefile") for word in self.mpi_args)

    def command(self) -> list[str]:
        """Returns the command line of the starter: mpirun or host_ranks.py."""
        if self.mpirun is None:
            starter = [sys.executable, "-P", "-m", "keras_ddl.launch.starters.host_ranks"]
            if self.hosts:
                hosts = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
                starter = [*starter[:-1], "keras_ddl.launch.starters.remote_ranks", "--hosts", hosts]
            numbers = ["-np", str(self.num_ranks), *(["--spares", str(self.spares)] if self.spares else [])]
            numbers += ["--more"] if self.hostfile is not None else []
            return [*starter, *numbers, "--", *self.program]
        wrapper = [sys.executable, "-P", "-m", "keras_ddl.launch.mpi.rank_proxy", "--", *self.program]
        forward = ["KERAS_DDL_LAUNCHER"]
        if python_path():
            forward.append("PYTHONPATH")
        if self.several_hosts and "LD_LIBRARY_PATH" in os.environ:
            forward.append("LD_LIBRARY_PATH")  # a Python from a site's module may need it
        return mpirun_module.command(
            self.mpirun,
            wrapper,
            num_ranks=self.num_ranks,
            hosts=self.hosts,
            forward=forward,
            extra=self.mpi_args,
            allocation=mpirun_module.in_allocation(os.environ) or self._mpi_args_name_hosts,
        )

    @property
    def cannot_continue_reason(self) -> str | None:
        """The reason why the job cannot continue without lost ranks although `min_ranks` is set; None if it can."""
        if self.min_ranks is None or self.mpirun is None:
            return None
        return (
            f"-np MIN:MAX: mpirun ({self.mpirun.version}) starts the ranks, and ends all of them when one is lost; "
            "--restarts N then starts the job again. To continue without a restart, leave out --mpirun, --mpi-arg and "
            "the host discovery script, and run outside of a resource manager's job."
        )

    @property
    def fixed_hosts_reason(self) -> str | None:
        """The reason why the job does not follow its host file; None if it does, or has no host file."""
        if self.min_ranks is None or self.mpirun is not None or self.num_ranks > 1:
            return None
        return "a job that starts with one rank cannot add ranks, so it does not follow the host file."

    @property
    def starter(self) -> str:
        """The program that starts the ranks, for messages."""
        if self.mpirun is None:
            return "remote_ranks" if self.hosts else "host_ranks"
        return "mpirun"

    @property
    def folder(self) -> Path:
        """The directory for the temporary files of the job on this host."""
        return job_folder.on_this_host(self.id)

    def log_file(self, rank: int) -> IO[bytes] | None:
        """Opens the file in `output_dir` for the output of a rank."""
        if self.output_dir is None:
            return None
        self.output_dir.mkdir(parents=True, exist_ok=True)
        width = len(str(self.num_ranks - 1))
        return (self.output_dir / f"rank-{rank:0{width}}.log").open("wb", buffering=0)

    def starter_environment(self, launcher: str) -> dict[str, str]:
        """Returns the environment of the starter and of the wrappers; the programs get `environment`."""
        result = mpirun_module.environment(os.environ)
        if self.mpirun is not None and not self.several_hosts:
            result = mpirun_module.ONE_HOST | result
        result["KERAS_DDL_LAUNCHER"] = launcher
        if self.mpirun is None and self.hosts:
            result["KERAS_DDL_JOB_ID"] = self.id
        # Open MPI's files on this host go into the job's folder, which is removed even if mpirun had to be killed.
        result["PRTE_MCA_prte_local_tmpdir_base"] = str(self.folder)
        result["PYTHONPATH"] = python_path()
        return result


def make(
    program: Sequence[str],
    *,
    num_ranks: int | None,
    hosts: str | None = None,
    mode: str | None = None,
    mpirun: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float | None = None,
    needs_mpi: bool = False,
    mpi_args: tuple[str, ...] = (),
    min_ranks: int | None = None,
    spares: int = 0,
    hostfile: HostFile | None = None,
    **rest: object,
) -> JobSpec:
    """Checks settings, and returns the job.

    `needs_mpi`: whether mpirun must start the ranks.

    Raises:
        ConfigError: the settings contradict each other.
        LaunchError: no mpirun is installed.
    """
    parsed = parse_hosts(hosts) if hosts else ()
    slots = sum(host.slots for host in parsed)
    places = max(0, slots - spares) or allocation_size()
    if num_ranks is None or (min_ranks is not None and places is not None):
        num_ranks = places if num_ranks is None or places is None else min(num_ranks, places)
    if num_ranks is None:
        raise ConfigError(
            "np: the number of ranks must be given. Received: neither -np nor --hosts, and SLURM_NTASKS is "
            "not set. Try -np 2."
        )
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ConfigError(f"np must be a whole number of ranks, 1 or more. Received: np={num_ranks!r}.")
    if num_ranks < (min_ranks or 1):
        raise ConfigError(
            f"np: the hosts must have slots for at least MIN ranks of -np MIN:MAX. Received: MIN={min_ranks}, but "
            f"{num_ranks} slots. Name more hosts, or choose a smaller MIN."
        )
    if parsed and num_ranks + spares > slots:
        received = f"np={num_ranks}, {f'spares={spares}, ' if spares else ''}hosts={hosts!r}"
        raise ConfigError(
            f"np plus spares must not exceed the number of slots on the hosts ({slots}). "
            f"Received: {received}. Write the number of ranks after each host, as in 'h0:2,h1:2'."
        )
    for name, seconds in (("timeout", timeout), ("grace", grace)):
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"{name} must be a number of seconds above 0. Received: {name}={seconds!r}.")
    environment = mpirun_module.environment(os.environ)
    environment.update(env or {})
    if mode is not None:
        environment["KERAS_DDL_MODE"] = mode
        indices = [index for index, host in enumerate(parsed) for _ in range(host.slots)] or [0] * num_ranks
        if parsed or not mpirun_module.in_allocation(os.environ):
            parse_mode(mode, indices[:num_ranks])
    # Otherwise Python would write its output to the pipe in blocks of 8 KB, late.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment["PYTHONHASHSEED"] = _hash_seed(environment.get("PYTHONHASHSEED", ""))
    tune_malloc(environment, max((host.slots for host in parsed), default=num_ranks))
    requested = mpirun or config.get("MPIRUN") or mpi_args or needs_mpi
    # MPI ends all ranks if a rank or a daemon dies, so a job that may continue is started without MPI.
    continues = min_ranks is not None
    by_mpirun = bool(requested or (parsed and not continues) or mpirun_module.in_allocation(os.environ))
    if spares and (by_mpirun or not continues):
        where = "ranks that mpirun starts" if continues else "a fixed number of ranks"
        raise ConfigError(
            "--spares needs -np MIN:MAX and ranks started without mpirun: only such a job continues after a "
            f"rank is lost. Received: --spares {spares}, and {where}. Give -np MIN:MAX, or use --restarts N instead."
        )
    return JobSpec(
        program=tuple(program),
        num_ranks=num_ranks,
        mpirun=mpirun_module.find(mpirun) if by_mpirun else None,
        mpi_args=mpi_args,
        environment=environment,
        hosts=parsed,
        timeout=timeout,
        grace=grace,
        min_ranks=min_ranks,
        spares=spares,
        hostfile=None if by_mpirun or not continues or num_ranks == 1 else hostfile,
        **rest,  # type: ignore[arg-type]
    )


def _hash_seed(chosen: str) -> str:
    """Returns the PYTHONHASHSEED of all ranks, given the value that the user has set.

    By default, Python orders a set of strings differently in each process, so a vocabulary built from a set would
    differ between ranks. The default is 0, so that the order is also the same in resumed runs and for any number of
    ranks. "random" becomes one random number for all ranks of the job.
    """
    return str(secrets.randbelow(2**32)) if chosen == "random" else chosen or "0"


@dataclass
class JobResult:
    """How a job ended.

    Attributes:
        outcomes: one per rank.
        results: rank -> the bytes that the program of `keras_ddl.run` returned, for each rank with a result.
        signal: the signal that terminated the job (SIGINT, SIGTERM, SIGHUP), or None.
        refused: the programs were not started because the checks of the hosts failed (preflight.py).
        timed_out: the job was ended because of its timeout.
        seconds: wall-clock time.
        starter: the program that started the ranks.
        starter_text, starter_status: the end of the starter's own output, and its status (negative for a signal).
    """

    outcomes: list[RankOutcome]
    results: dict[int, bytes] = field(default_factory=dict, repr=False)
    signal: int | None = None
    refused: bool = False
    timed_out: bool = False
    seconds: float = 0.0
    starter: str = "mpirun"
    starter_text: str = ""
    starter_status: int | None = None

    @property
    def first_failure(self) -> RankOutcome | None:
        """The rank whose failure explains the failures of the others."""
        return first_failure(self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether every rank reported that its program ended by itself with status 0."""
        return bool(self.outcomes) and all(outcome.done for outcome in self.outcomes)

    @property
    def asks_to_restart(self) -> bool:
        """Whether the ranks ended with `RESTART_STATUS`, after a notice or a change of the hosts."""
        ended = [outcome for outcome in self.outcomes if outcome.stopped_by is None or outcome.status == RESTART_STATUS]
        return bool(ended) and all(outcome.status == RESTART_STATUS for outcome in ended)

    @property
    def exit_status(self) -> int:
        """The exit status of the launcher: 0 only when `ok`."""
        if self.ok:
            return 0
        if self.asks_to_restart:
            return RESTART_STATUS
        if self.signal is not None:
            return 128 + self.signal
        if self.timed_out:
            return TIMEOUT_STATUS
        first = self.first_failure
        if first is not None:
            return first.exit_status
        status = self.starter_status or 1  # after MPI_Abort, the number that was passed to it
        return status if status > 0 else 128 - status

    @property
    def starter_end(self) -> str:
        """A text that says how the starter ended."""
        return status_text(self.starter_status or 0)

    @property
    def failure_text(self) -> str:
        """The message about a failure, which ends with the error and how to resume; "" without a failure."""
        first, hint = self.first_failure, resume_hint(self.outcomes)
        if self.ok:
            return vanished(self.outcomes)
        if self.asks_to_restart:
            return f"keras-ddl: the ranks ended with status {RESTART_STATUS} and ask to be started again.\n{hint}"
        if self.signal is not None:
            return hint
        if first is not None:
            return explain(self.outcomes, first, self.starter_text, self.starter)
        if self.timed_out:
            return hint
        end = f"keras-ddl: {self.starter} ended ({self.starter_end}) before the ranks had finished.\n"
        return f"{self.starter_text.rstrip()}\n{end}{hint}".lstrip()
