"""keras-ddl bench: compares all_reduce with MPI_Allreduce. all_reduce.py measures.

`bench train` is in train_command.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from keras_ddl import packages
from keras_ddl.bench import machine_load
from keras_ddl.communicator.native.dtypes import DTYPES
from keras_ddl.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_OPS = ("sum", "mean", "min", "max", "product")
# Options for the launcher; all others are passed to the ranks.
_LAUNCH = ("num_ranks", "hosts", "mode")


class _Bytes(click.ParamType):
    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]+)([KMG]?)B?", str(value).upper())
        if not match or int(match[1]) == 0:
            self.fail(f"{value!r} is not a number of bytes such as 1000, 64K or 256M", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


def _sized(text: str) -> dict[str, Any]:
    return {"type": _Bytes(), "default": text, "show_default": True, "metavar": "SIZE"}


class _Group(click.Group):
    """`bench` itself, and `bench train`, whose module is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["train"]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return importlib.import_module("keras_ddl.bench.train_command").command if name == "train" else None


@click.group("bench", cls=_Group, invoke_without_command=True, short_help="Compare all_reduce with MPI_Allreduce.")
@click.option("-np", "--np", "num_ranks", type=click.IntRange(min=1), help="Start this many ranks.", metavar="N")
@click.option("--hosts", "-H", help="Hosts and the ranks each takes, as in h0:2,h1:2.", metavar="HOSTS")
@click.option("--mode", help="Topology: p, or dimensions such as x:2x2 (KERAS_DDL_MODE).", metavar="MODE")
@click.option("-b", "--begin", help="Smallest buffer of a rank.", **_sized("1K"))
@click.option("-e", "--end", help="Largest buffer of a rank.", **_sized("64M"))
@click.option("-f", "--factor", type=click.FloatRange(min=1, min_open=True), default=4.0, show_default=True,
              help="Factor from one size to the next.")  # fmt: skip
@click.option("-d", "--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True, help="Dtype.")
@click.option("-o", "--op", type=click.Choice(_OPS), default="sum", show_default=True, help="Reduction.")
@click.option("-n", "--iters", type=click.IntRange(min=1), default=20, show_default=True, help="Calls per size.")
@click.option("-w", "--warmup", type=click.IntRange(min=0), default=25, show_default=True,
              help="Warm-up calls; during the first 25 the engine tries its schemes.")  # fmt: skip
@click.option("-c/-C", "--check/--no-check", default=True, show_default=True, help="Compare results with NumPy's.")
@click.option("--mpi/--no-mpi", default=True, show_default=True, help="Measure MPI_Allreduce too.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write the figures to this file too.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False), help="Draw busbw to this file (matplotlib).")
@click.pass_context  # type: ignore[arg-type]  # click's type takes no **options
def command(ctx: click.Context, num_ranks: int | None, hosts: str | None, mode: str | None, **options: Any) -> int:
    """Measure all_reduce at a range of sizes, in turns with plain MPI_Allreduce.

    \b
    keras-ddl bench -np 2
    keras-ddl bench --hosts h0:4,h1:4 -b 1M -e 256M -d bfloat16 --json bench.json
    keras-ddl run -np 4 keras-ddl bench -e 1M
    keras-ddl bench train --ranks 1,2             how trainings scale; keras-ddl bench train --help

    With -np or --hosts the command starts the ranks itself; under keras-ddl run, mpirun or srun it is a rank. Times are
    the slowest rank's, medians of interleaved turns. algbw = bytes / time; busbw = algbw 2 (n-1)/n for n ranks, which
    can be compared with the speed of a link (the definitions of nccl-tests). The exit status is 1 if a result was
    wrong. A line on stderr says if other programs or virtual machines used the cores.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    if options["plot_file"] and packages.missing(["matplotlib"]):
        raise ConfigError(
            "--plot needs matplotlib. Received: an environment without it. Install it: "
            f"{packages.pip_install('matplotlib')}"
        )
    if options["begin"] > options["end"]:
        raise ConfigError(
            f"-b must not be above -e. Received: -b {options['begin']}, -e {options['end']} bytes. Swap them."
        )
    if num_ranks is not None or hosts is not None:
        return _start_ranks(ctx, num_ranks, hosts, mode)
    return _measure(mode, **options)


def _start_ranks(ctx: click.Context, num_ranks: int | None, hosts: str | None, mode: str | None) -> int:
    """Starts ranks that run this command. Returns their exit status."""
    from keras_ddl.cli.run import run_job
    from keras_ddl.launch import job
    from keras_ddl.topology.launcher import find_launcher

    around = find_launcher()
    if around is not None:
        raise ConfigError(
            "bench: -np and --hosts start ranks, but this process is a rank. Received: -np or --hosts in a process "
            f"that {around.name} started as rank {around.rank}. Leave them out."
        )
    words = [sys.executable, "-m", "keras_ddl.cli", "bench"]
    for param in ctx.command.params:
        value = ctx.params[param.name]
        if param.name in _LAUNCH or value is None:
            continue
        if isinstance(param, click.Option) and param.is_flag:
            words.append((param.opts if value else param.secondary_opts)[-1])
        else:
            words += [param.opts[-1], str(value)]
    needs_mpi = bool(ctx.params["mpi"]) and num_ranks != 1
    if hosts is None and (warning := machine_load.before()):
        click.echo(f"keras-ddl bench: {warning}", err=True)
    return run_job(job.make(words, num_ranks=num_ranks, hosts=hosts, mode=mode, needs_mpi=needs_mpi))


def _measure(
    mode: str | None,
    begin: int,
    end: int,
    factor: float,
    dtype: str,
    op: str,
    iters: int,
    warmup: int,
    check: bool,
    mpi: bool,
    json_file: str | None,
    plot_file: str | None,
) -> int:
    """Measures on the running ranks; COLLECTIVE. Rank 0 prints. Returns the exit status."""
    import keras_ddl
    from keras_ddl.bench import all_reduce as bench
    from keras_ddl.bench.rounds import machine
    from keras_ddl.communicator import describe

    keras_ddl.init(mode)
    size, first = keras_ddl.size(), keras_ddl.rank() == 0
    rows: list[bench.Row] = []

    def measured() -> Iterator[bench.Row]:
        for nbytes in bench.sizes(begin, end, factor):
            rows.append(
                bench.measure(
                    nbytes, bench.element_type(dtype), op, iterations=iters, warmup=warmup, mpi=mpi, check=check
                )
            )
            yield rows[-1]

    title = f"all_reduce, {dtype} {op}, {size} rank(s) on {keras_ddl.num_hosts()} host(s)"
    if first:
        click.echo(f"# {title}\n# {machine()}\n# {describe()}")
        if size > 1 and mpi:
            click.echo(f"# {_mpi_line()}")
        if size == 1:
            click.echo("# A single rank exchanges nothing. -np 2 starts two ranks.")
    watch, own = machine_load.Watch(), time.process_time()
    for line in bench.table(measured(), size):
        if first:
            click.echo(line)
    busy = _busy_hosts(watch, time.process_time() - own)
    for host, warning in busy.items():
        if first:
            click.echo(f"keras-ddl bench: {host}: {warning}", err=True)
    if first and json_file:
        content = {
            "machine": machine(),
            "engine": describe(),
            "ranks": size,
            "hosts": keras_ddl.num_hosts(),
            "dtype": dtype,
            "op": op,
            "rows": bench.as_json(rows, size),
            "busy": busy,
        }
        Path(json_file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    if first and plot_file:
        bench.plot(rows, size, plot_file, title)
    wrong = sum(row.wrong or 0 for row in rows)
    if wrong and first:
        click.echo(f"keras-ddl: {wrong} elements differ from NumPy's result.", err=True)
    return 1 if wrong else 0


def _busy_hosts(watch: machine_load.Watch, own_seconds: float) -> dict[str, str]:
    """Returns host -> a sentence about it, for hosts that were busy during the measurement. COLLECTIVE."""
    import keras_ddl

    ranks = keras_ddl.all_gather_object((socket.gethostname(), own_seconds))
    here = sum(seconds for host, seconds in ranks if host == socket.gethostname())
    found = keras_ddl.all_gather_object((socket.gethostname(), watch.load(here).warning("while this was measured")))
    return {host: warning for host, warning in reversed(found) if warning}


def _mpi_line() -> str:
    from keras_ddl.communicator.transports import mpi

    if not mpi.running():
        return "MPI_Allreduce is not measured. To measure it, start the ranks with keras-ddl run --mpirun mpirun."
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0]
