"""Translates IBM's command ddlrun to keras-ddl run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from keras_ddl.cli.main import run_and_exit
from keras_ddl.cli.run import resolve_program, run_job
from keras_ddl.errors import ConfigError
from keras_ddl.topology import parse_mode

# Makes Open MPI use sockets between hosts; inside a host the ranks share memory.
_TCP = ("--mca", "pml", "ob1", "--mca", "btl", "self,tcp")
_RANK = re.compile(r"rank\s+([0-9]+)\s*=\s*([A-Za-z0-9][A-Za-z0-9._-]*)(?:\s+slots?\s*=\s*\S+)?")


F = TypeVar("F", bound=Callable[..., Any])


def _option(*names: str, **settings: Any) -> Callable[[F], F]:
    """Declares an option with one dash and with two, as ddlrun accepts both."""
    spellings = [f"{dashes}{name}" for name in names for dashes in ("-", "--")]
    return click.option(*spellings, names[-1].replace("-", "_").lower(), **settings)


def _no_number_of_ranks(_: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise ConfigError(
            f"ddlrun starts one rank for each GPU of its hosts. Received: {option.opts[0]} {value}. Set the number per "
            f"host with -accelerators, or use `keras-ddl run -np {value}`."
        )


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help", "-help"]})
@_option("m", "mode", help="DDL's mode; default: p, with dimensions if racks or aisles are given.")
@_option("ddloption", "ddlarg", multiple=True, help="An option for DDL, as in '-dump_iter 50'; may be repeated.")
@_option("no_ddloptions", is_flag=True, help="Leave DDL_OPTIONS to the script, which calls ddl.init(options).")
@_option("rf", "rankfile", type=click.Path(exists=True, dir_okay=False), help="The host of each rank.")
@_option("H", "host", help="Hosts, separated by commas; default: this one.")
@_option("hostfile", type=click.Path(exists=True, dir_okay=False), help="A file with one host per line.")
@_option("nodes", type=click.IntRange(min=1), help="Number of hosts in each rack; default: all, in equal parts.")
@_option("aisles", type=click.IntRange(min=1), default=1, help="Number of aisles.")
@_option("racks", type=click.IntRange(min=1), default=1, help="Number of racks in each aisle.")
@_option("accelerators", type=click.IntRange(min=1), help="Ranks per host; default: the number of GPUs here.")
@_option("tcp", is_flag=True, help="Use sockets between hosts, even if there is InfiniBand.")
@_option("mpiarg", multiple=True, help="Argument(s) for mpirun; may be repeated.")
@_option("v", "verbose", is_flag=True, help="Show the mpirun command and mpirun's output.")
@click.option("-np", "--np", "-n", hidden=True, expose_value=False, callback=_no_number_of_ranks)
@click.option("--dry-run", is_flag=True, help="Print DDL_OPTIONS and the mpirun command, and start nothing.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGUMENTS]...")
def command(
    mode: str | None,
    ddlarg: tuple[str, ...],
    no_ddloptions: bool,
    rankfile: str | None,
    host: str | None,
    hostfile: str | None,
    nodes: int | None,
    aisles: int,
    racks: int,
    accelerators: int | None,
    tcp: bool,
    mpiarg: tuple[str, ...],
    verbose: bool,
    dry_run: bool,
    program: tuple[str, ...],
) -> int:
    """Run PROGRAM on the GPUs of some hosts, one rank on each GPU.

    \b
    ddlrun -H h0,h1 python train.py
    ddlrun --accelerators 2 --ddlarg "-dump_iter 50" python train.py
    """
    from keras_ddl.launch import job as job_module

    sources = [name for name, value in (("-rf", rankfile), ("-H", host), ("-hostfile", hostfile)) if value]
    if len(sources) > 1:
        raise ConfigError(f"The hosts must be given once. Received: {' and '.join(sources)}. Leave out all but one.")
    if rankfile is not None:
        if accelerators is not None:
            raise ConfigError(
                "A rank file sets the number of ranks per host. Received: -accelerators as well. Leave it out."
            )
        hosts = parse_rankfile(Path(rankfile).read_text(encoding="utf-8"))
    else:
        names = host.split(",") if host else _lines(hostfile) if hostfile else []
        ranks = accelerators or _gpus()
        hosts = [(name.strip(), ranks) for name in names] or [("", ranks)]
    local = hosts[0][0] == ""
    if nodes not in (None, len(hosts) / (racks * aisles)):
        raise ConfigError(
            f"{aisles} aisle(s) x {racks} rack(s) x {nodes} host(s) must equal the number of hosts. Received: "
            f"{'no hosts, so only this one' if local else f'{len(hosts)} host(s)'}. Name them with -H or -hostfile."
        )
    if mode is None:
        mode = mode_of(hosts, aisles, racks)
    job = job_module.make(
        resolve_program(program, local=local),
        num_ranks=sum(ranks for _, ranks in hosts),
        hosts=None if local else ",".join(f"{name}:{ranks}" for name, ranks in hosts),
        env={} if no_ddloptions else {"DDL_OPTIONS": ddl_options(mode, ddlarg, hosts)},
        mpi_args=(*(_TCP if tcp else ()), *(word for text in mpiarg for word in shlex.split(text))),
        verbose=verbose,
    )
    if tcp and job.mpirun is not None and job.mpirun.family != "Open MPI":
        raise ConfigError(
            f"-tcp needs Open MPI's mpirun. Received: {job.mpirun.version}. Use -mpiarg with its own options."
        )
    _warn_of_another_ddl(program)
    if dry_run:
        click.echo(shlex.join([f"DDL_OPTIONS={job.environment.get('DDL_OPTIONS', '')}", *job.command()]))
        return 0
    return run_job(job)


def _warn_of_another_ddl(program: Sequence[str]) -> None:
    """Warns if `import ddl` finds another file than keras_ddl's, because Python looks next to the script first."""
    script = next((Path(word) for word in program if word.endswith(".py")), None)
    if script is not None and script.with_name("ddl.py").is_file():
        click.echo(
            f"ddlrun: `import ddl` in {script} finds {script.with_name('ddl.py')}, which is next to the script, "
            "instead of keras_ddl's module. If it is IBM's ddl.py, it needs IBM's library. Rename the file, or move "
            "it to another directory.",
            err=True,
        )


def ddl_options(mode: str, arguments: Sequence[str], hosts: Sequence[tuple[str, int]]) -> str:
    """Returns DDL_OPTIONS for (host, ranks) pairs.

    Raises: ConfigError: the options are invalid, or the mode does not fit the hosts. Nothing has been started then.
    """
    from keras_ddl.ddl.options import parse
    from keras_ddl.launch.mpi.mpirun import in_allocation

    text = " ".join(["-mode", mode, *arguments])
    if hosts[0][0] or not in_allocation(os.environ):  # otherwise the resource manager chooses the hosts
        parse_mode(parse(text).mode or mode, [number for number, (_, ranks) in enumerate(hosts) for _ in range(ranks)])
    return text


def mode_of(hosts: Sequence[tuple[str, int]], aisles: int, racks: int) -> str:
    """Returns DDL's mode for (host, ranks) pairs, rack by rack and aisle by aisle: "p:4x8x2".

    Raises: ConfigError: the racks would have unequal numbers of hosts.
    """
    if aisles * racks == 1:
        return "p"
    if len(hosts) % (aisles * racks) or len({ranks for _, ranks in hosts}) > 1:
        raise ConfigError(
            f"{aisles} aisle(s) of {racks} rack(s) must have equal numbers of hosts, with equal numbers of ranks. "
            f"Received: {', '.join(f'{name}:{ranks}' for name, ranks in hosts if name) or 'none'}. Name them with -H."
        )
    dims = [hosts[0][1], len(hosts) // (aisles * racks), racks, aisles]
    return "p:" + "x".join(map(str, dims[: 4 if aisles > 1 else 3]))


def parse_rankfile(text: str) -> list[tuple[str, int]]:
    """Returns (host, ranks) of an MPI rank file. Slots are ignored: ranks are not bound to cores.

    Raises: ConfigError: a line is invalid, or ranks are not numbered host by host.
    """
    hosts: list[str] = []
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    for number, line in enumerate(lines):
        match = _RANK.fullmatch(line)
        if match is None or int(match[1]) != number:
            raise ConfigError(f"A rank file must list rank 0, 1, ... as in 'rank 0=h0 slot=0:0-9'. Received: {line!r}.")
        hosts.append(match[2])
    runs = [name for number, name in enumerate(hosts) if number == 0 or hosts[number - 1] != name]
    if not hosts or len(set(runs)) != len(runs):
        raise ConfigError(f"A rank file must number the ranks host by host. Received: the order {', '.join(runs)}.")
    return [(name, hosts.count(name)) for name in runs]


def _lines(path: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line]


def _gpus() -> int:
    from keras_ddl.packages.nvidia_driver import device_files

    devices = device_files()
    if not devices:
        raise ConfigError(
            "ddlrun starts one rank per GPU. Received: a host without GPUs. Set the number with -accelerators."
        )
    return len(devices)


def main(argv: list[str] | None = None) -> None:
    """Runs ddlrun and exits as keras-ddl does."""
    run_and_exit(command, "ddlrun", argv)
