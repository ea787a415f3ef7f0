"""Writes the output of `keras-ddl run --dry-run`: comments about a job, then the command line that starts its ranks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from keras_ddl.launch.hosts.placement import Placement, ranks_by_host
from keras_ddl.launch.job import JobSpec
from keras_ddl.launch.mpi.mpirun import ALLOCATIONS, in_allocation
from keras_ddl.launch.mpi.mpirun import environment as base_environment
from keras_ddl.launch.output import masking
from keras_ddl.launch.starters import remote_ranks


def plan(job: JobSpec, own: Mapping[str, str], *, restarts: int, placement: Placement) -> str:
    """Returns the text. Starts no process and contacts no host.

    Args:
        own: variables that the user has set for the program.
    """
    lines = [f"program: {masking.shown(job.program)}", f"directory: {job.directory}"]
    lines += ["hosts and ranks:", *(f"  {each}" for each in _places(job))]
    lines.append(f"cores: {_cores(job)}")
    lines.append(f"ranks started by: {_starter(job)}")
    lines += ["environment of the program, added to this shell's:", *_environment(job, own)]
    lines += _on_failure(job, restarts, placement)
    if job.mpirun is None and job.hosts:
        lines.append("remote_ranks then runs on each host:")
        lines += [
            f"  {shlex.join(remote_ranks.command_on(name, job.starter_environment('')))}"
            for name in ranks_by_host(job.num_ranks + job.spares, job.hosts)
        ]
    comments = ["# " + line.replace("\n", "\\n") for line in lines]
    return "\n".join([*comments, masking.shown(job.command())])


def _places(job: JobSpec) -> list[str]:
    if not job.hosts:
        number = _span(0, job.num_ranks)
        if job.spares:
            number += f"; {_span(job.num_ranks, job.spares, 'spare')}"
        if job.mpirun is not None and in_allocation(os.environ):
            names = [f"{name}={os.environ[name]}" for name in ALLOCATIONS if name in os.environ]
            return [f"chosen by the resource manager ({', '.join(names)}): {number}"]
        return [f"this host: {number}"]
    lines, first = [], 0
    for name, count in ranks_by_host(job.num_ranks + job.spares, job.hosts).items():
        ranks = max(0, min(count, job.num_ranks - first))
        parts = [_span(first, ranks)] if ranks else []
        parts += [_span(first + ranks, count - ranks, "spare")] if count > ranks else []
        lines.append(f"{name}: {'; '.join(parts)}")
        first += count
    return lines


def _span(first: int, count: int, what: str = "rank") -> str:
    return f"{what} {first}" if count == 1 else f"{what}s {first} to {first + count - 1}"


def _cores(job: JobSpec) -> str:
    if any("bind" in word for word in job.mpi_args):
        return "bound as the arguments for mpirun say"
    text = "no rank is bound to cores"
    if job.hosts or job.several_hosts:
        return text
    return f"{text}; {len(os.sched_getaffinity(0))} are usable here"


def _starter(job: JobSpec) -> str:
    if job.mpirun is not None:
        return f"{job.mpirun.path} ({job.mpirun.version})"
    return f"{job.starter}, without MPI"


def _environment(job: JobSpec, own: Mapping[str, str]) -> list[str]:
    base, lines = base_environment(os.environ), []
    for name, value in sorted(job.environment.items()):
        if base.get(name) != value or name in own:
            lines.append(f"  {name}={masking.HIDDEN if masking.is_secret(name) else shlex.quote(value)}")
    return lines


def _on_failure(job: JobSpec, restarts: int, placement: Placement) -> list[str]:
    lines = []
    if job.min_ranks is not None:
        how = "the other ranks continue" if job.mpirun is None else "the job ends"
        lines.append(f"when a rank is lost: {how}; at least {job.min_ranks} are needed")
    if restarts:
        lines.append(f"when the job fails: it is started again, up to {restarts} times")
    if placement.discovery is not None:
        (command,) = masking.hidden([placement.discovery.command])
        lines.append(f"hosts: printed just now by {command!r}, which is run again during the job")
    if job.hostfile is not None:
        lines.append(f"hosts: the job follows changes of {job.hostfile.path}")
    if job.timeout is not None:
        lines.append(f"the job ends after {job.timeout:g} s")
    if job.output_dir is not None:
        lines.append(f"output of each rank: {job.output_dir}")
    return lines
