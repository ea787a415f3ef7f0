"""keras-ddl run: runs a program on several ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from keras_ddl.cli import job_file, part_options
from keras_ddl.cli.option_kinds import InFile, Ranks, Rare
from keras_ddl.errors import ConfigError, KerasDdlError

if TYPE_CHECKING:
    from keras_ddl.launch.job import JobSpec
    from keras_ddl.launch.watchers import Watchers

_COUNT = click.IntRange(min=1)
_NUMBER = re.compile(r"(-n|-np|--np|--num-proc)(?:=?(?P<value>\d+(?::\d*)?))?")  # spellings of the number of ranks


def complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Makes the shell complete file names, for a program and its arguments."""
    return [CompletionItem(incomplete, type="file")]


def environment_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --env and --env-file, which `parse_env` reads."""
    by_file = click.option(
        "--env-file",
        "env_files",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False),
        cls=Rare,
        help="Variables for the program from a file of lines NAME=VALUE; may be repeated.",
        metavar="FILE",
    )
    by_name = click.option(
        "-x",
        "--env",
        "env",
        multiple=True,
        help="Variable for the program. NAME alone copies its value: use this for secrets.",
        metavar="NAME[=VALUE]",
    )
    return by_name(by_file(command))


@click.command(
    "run",
    cls=job_file.Command,
    context_settings={"allow_interspersed_args": False},
    short_help="Run a program on several ranks.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=job_file.load,
    help="A TOML file with options and the program.",
    metavar="FILE",
)
@click.option(
    "-np",
    "--np",
    "-n",
    "--num-proc",
    "num_ranks",
    type=Ranks(),
    help="Number of ranks; MIN:MAX: start MAX, continue while MIN are left.",
    metavar="N",
)
@click.option("--hosts", "-H", help="Hosts and their ranks, as in h0:2,h1:2.", metavar="HOSTS")
@click.option(
    "--hostfile",
    "--host-file",
    "--machinefile",
    type=click.Path(exists=True, dir_okay=False),
    help="Hosts and their ranks, from a file.",
    metavar="FILE",
)
@click.option("--tf-config", is_flag=True, cls=Rare, help="Take hosts and ranks from the cluster in TF_CONFIG.")
@click.option(
    "--tf-config-file",
    cls=InFile,
    type=click.Path(exists=True, dir_okay=False),
    help="A file with the cluster, in the form of TF_CONFIG.",
    metavar="FILE",
)
@click.option("--mode", cls=Rare, help="Topology: p, or dimensions such as x:2x2 (KERAS_DDL_MODE).", metavar="MODE")
@click.option("--mpirun", cls=Rare, help="The mpirun to use (KERAS_DDL_MPIRUN).", metavar="PATH")
@click.option(
    "--mpi-arg", "mpi_args", cls=Rare, multiple=True, help="Arguments for mpirun; may be repeated.", metavar="ARGS"
)
@environment_options
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    help="Start the job again after a failure, up to N times.",
    metavar="N",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    default=0,
    help="With -np MIN:MAX: N more processes wait to replace lost ranks.",
    metavar="N",
)
@click.option(
    "--host-discovery-script",
    cls=Rare,
    help="A command that prints the available hosts, as lines host:slots.",
    metavar="COMMAND",
)
@click.option(
    "--slots",
    "--slots-per-host",
    cls=InFile,
    type=_COUNT,
    help="Ranks on each host that is listed without a number.",
    metavar="N",
)
@click.option(
    "--hosts-timeout",
    cls=InFile,
    type=float,
    default=600.0,
    help="How long to wait for enough hosts (600).",
    metavar="SECONDS",
)
@click.option("--timeout", type=float, help="End the job after this time, with status 124.", metavar="SECONDS")
@click.option(
    "--grace",
    cls=Rare,
    type=float,
    help="Time for ranks to save and end after SIGTERM (2) or Ctrl-C (5).",
    metavar="SECONDS",
)
@click.option(
    "--output-dir", type=click.Path(file_okay=False), help="Write each rank's output to a file in DIR.", metavar="DIR"
)
@part_options.add
@click.option("--verbose", "-v", cls=Rare, is_flag=True, help="Show the mpirun command and mpirun's output.")
@click.option("--dry-run", is_flag=True, help="Print what would run, and start nothing.")
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=job_file.show_all,
    help="Show all options and spellings.",
)
@click.argument(
    "program",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[--] PROGRAM [ARGUMENTS]...",
    shell_complete=complete_files,
)
def command(
    num_ranks: tuple[int | None, int | None] | None,
    hosts: str | None,
    hostfile: str | None,
    tf_config: bool,
    tf_config_file: str | None,
    mode: str | None,
    mpirun: str | None,
    mpi_args: tuple[str, ...],
    env: tuple[str, ...],
    env_files: tuple[str, ...],
    restarts: int,
    spares: int,
    host_discovery_script: str | None,
    slots: int | None,
    hosts_timeout: float,
    timeout: float | None,
    grace: float | None,
    output_dir: str | None,
    verbose: bool,
    dry_run: bool,
    program: tuple[str, ...],
    **part_values: Any,
) -> int:
    """Run PROGRAM on several ranks, one process each.

    \b
    keras-ddl run -np 2 python train.py --epochs 3
    keras-ddl run --hosts h0:2,h1:2 -- python -m my_package.train
    keras-ddl run -np 2:4 --spares 1 --restarts 3 python train.py

    Shows the output of rank 0 as it arrives, and complete lines of other ranks. If a rank fails, the job ends: the
    traceback of the rank that failed first is printed last, and its exit status is returned. With -np MIN:MAX the other
    ranks continue if a rank is killed.
    """
    from keras_ddl.launch import job as job_module
    from keras_ddl.launch.hosts import hostfile as hostfile_module
    from keras_ddl.launch.hosts.placement import Discovery, HostFile, Placement
    from keras_ddl.topology import tf_config as tf_config_module

    part_options.check(part_values)
    ranks_from = (num_ranks, hosts, hostfile, tf_config_file, host_discovery_script)
    if program and not tf_config and all(each is None for each in ranks_from):
        check_number_is_before(program)
    own = parse_env(env, env_files)
    variables = dict(own)
    if hostfile is not None:
        if hosts is not None:
            raise ConfigError(
                f"Hosts must be named once. Received: --hosts {hosts} and --hostfile {hostfile}. Leave one of them out."
            )
        hosts = hostfile_module.read(hostfile, slots)
    least, most = num_ranks or (None, None)
    if tf_config or tf_config_file:
        most, hosts = _cluster(tf_config_file, most, hosts, variables)
    discovery = Discovery(host_discovery_script, slots or 1) if host_discovery_script is not None else None
    if mode not in (None, "p") and (discovery, least) != (None, None):
        raise ConfigError(
            f"A mode with dimensions needs a fixed number of ranks. Received: mode={mode!r} for a number of ranks that "
            "may change. Leave out --mode."
        )
    job = job_module.make(
        resolve_program(program, local=hosts is None and discovery is None),
        num_ranks=most if discovery is None else least or most or 1,
        hosts=hosts,
        mode=mode,
        mpirun=mpirun,
        env=part_options.environment(part_values, variables),
        timeout=timeout,
        grace=grace,
        needs_mpi=discovery is not None,
        mpi_args=tuple(word for text in mpi_args for word in shlex.split(text)),
        output_dir=Path(output_dir) if output_dir else None,
        min_ranks=least,
        spares=spares,
        hostfile=None if hostfile is None else HostFile(hostfile, slots),
        max_ranks=most,
        verbose=verbose,
    )
    wanted = job.num_ranks if discovery is None else most if least is None else None  # None: as many as the hosts take
    placement = Placement(wanted, job.hosts, discovery, least, most)
    attempts = {"limit": restarts, "placement": placement, "hosts_seconds": hosts_timeout}
    if tf_config_module.for_rank(job.environment.get(tf_config_module.NAME, ""), 0, job.num_ranks) is None:
        why = f"its number of training tasks differs from the number of ranks ({job.num_ranks})"
        click.echo(f"keras-ddl: the ranks do not get TF_CONFIG: {why}.", err=True)
    if dry_run:
        if discovery is not None:
            ranks, available = placement.first(discovery.hosts()) or (job.num_ranks, ())
            job = dataclasses.replace(job, num_ranks=ranks, hosts=available)
        from keras_ddl.launch import plan_text

        click.echo(plan_text.plan(job, own, restarts=restarts, placement=placement))
        return 0
    if output_dir is not None:
        try:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--output-dir must be a directory that can be written to. Received: {output_dir!r} "
                f"({error.strerror}). Name a directory that you can write to."
            ) from None
    if job.cannot_continue_reason is not None:
        click.echo(f"keras-ddl: {job.cannot_continue_reason}", err=True)
    if hostfile is not None and job.fixed_hosts_reason is not None:
        click.echo(f"keras-ddl: {job.fixed_hosts_reason}", err=True)
    with part_options.watching(part_values, verbose=verbose) as watchers:
        return run_job(job, watchers=watchers, **attempts)


def _cluster(
    file: str | None, num_ranks: int | None, hosts: str | None, variables: dict[str, str]
) -> tuple[int, str | None]:
    """Returns (number of ranks, hosts) of the cluster in TF_CONFIG or a file; sets TF_CONFIG in `variables`.

    Raises: ConfigError: the cluster has no tasks that train, or contradicts -np or --hosts.
    """
    from keras_ddl.topology import tf_config

    text = Path(file).read_text(encoding="utf-8") if file else variables.get("TF_CONFIG", os.environ.get("TF_CONFIG"))
    origin = file or "TF_CONFIG"
    cluster = tf_config.parse(text, origin) if text else tf_config.Cluster()
    if not text or not cluster.tasks:
        raise ConfigError(
            f"--tf-config needs a cluster with a chief or workers. Received: {origin}={text!r}. Set TF_CONFIG, write "
            "tf-config-file = 'FILE' in the file of --config, or name the hosts with --hosts."
        )
    if hosts is not None or num_ranks not in (None, len(cluster.tasks)):
        raise ConfigError(
            f"--tf-config takes hosts and number of ranks from {origin} ({len(cluster.tasks)} tasks that train). "
            f"Received: np={num_ranks}, hosts={hosts!r} as well. Leave --tf-config out to choose them yourself."
        )
    if left_out := cluster.left_out_text():
        click.echo(f"keras-ddl: {left_out}", err=True)
    variables["TF_CONFIG"] = text
    return len(cluster.tasks), cluster.hosts_option()


def run_job(job: JobSpec, *, watchers: Watchers | None = None, **attempts: Any) -> int:
    """Runs the job and shows its output. `attempts`: arguments of RestartLoop. Returns the exit status."""
    from keras_ddl.launch.output import startup_notes
    from keras_ddl.launch.output.screen import Screen
    from keras_ddl.launch.output.sinks import FileDescriptorSink
    from keras_ddl.launch.restarts import RestartLoop
    from keras_ddl.launch.stdin import stdin_fd
    from keras_ddl.launch.watchers import Watchers

    sinks = {"stdout": FileDescriptorSink(1), "stderr": FileDescriptorSink(2)}
    terminals = {name: fd for (name, sink), fd in zip(sinks.items(), (1, 2)) if sink.terminal}
    screen = Screen(*sinks.values(), shows_notes=job.verbose or startup_notes.are_wanted(job.environment))
    watchers = watchers or Watchers()
    loop = RestartLoop(job, screen, stdin=stdin_fd(), terminals=terminals, watchers=watchers, **attempts)
    try:
        result = loop.run((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
    except KerasDdlError as error:
        watchers.event("end", status=1, error=f"{type(error).__name__}: {error}")
        raise
    screen.write_lines("err", result.failure_text.encode())
    # Writing the failure may have revealed that nobody reads the output any more.
    status = result.exit_status if screen.lost is None else 128 + screen.lost
    first = result.first_failure
    watchers.event(
        "end",
        status=status,
        rank=None if first is None or result.ok else first.rank,
        error=None if first is None or result.ok else first.describe(),
        signal=None if result.signal is None else signal.Signals(result.signal).name,
        timed_out=result.timed_out or None,
    )
    return status


def check_number_is_before(program: tuple[str, ...]) -> None:
    """Raises: ConfigError: the number of ranks is unknown, and -np comes after the program, as its argument."""
    from keras_ddl.topology.launcher import allocation_size

    if allocation_size() is not None:
        return
    for place, word in enumerate(program[1:], 1):
        match = _NUMBER.fullmatch(word)
        if match is None:
            continue
        value = match["value"] or "".join(program[place + 1 : place + 2])
        if not value.isdecimal():
            continue
        given = program[place : place + (1 if match["value"] else 2)]
        rest = (*program[:place], *program[place + len(given) :])
        raise ConfigError(
            "np: the number of ranks must come before the program, because all words after the program are passed to "
            f"it. Received: {shlex.join(given)!r} after {program[0]!r}. Write: keras-ddl run -np {value} "
            f"{shlex.join(rest)}"
        )


def resolve_program(program: tuple[str, ...], *, local: bool) -> list[str]:
    """Returns the command line of every rank: `python` becomes this interpreter, which also runs .py files.

    `local`: the ranks run on this host, so the program must exist here.

    Raises: ConfigError: there is no program.
    """
    if not program:
        raise ConfigError(
            "A program must be given, after the options. Received: none. Try: keras-ddl run -np 2 python train.py, "
            "where train.py makes its model under `with keras_ddl.Strategy().scope():`. More: keras-ddl run --help."
        )
    name, *arguments = program
    if name.endswith(".py"):
        name, arguments = sys.executable, list(program)
    elif name in ("python", "python3"):
        # Use the Python that has keras_ddl, even if its environment is not activated.
        name = sys.executable
    elif name == "keras-ddl":
        name, arguments = sys.executable, ["-m", "keras_ddl.cli", *arguments]
    elif local and shutil.which(name) is None:
        what = "which is not a file that can be executed" if os.sep in name else "which is not in PATH"
        raise ConfigError(f"The program must exist. Received: {name!r}, {what}.{_similar_file(Path(name))}")
    if local and name == sys.executable and arguments and arguments[0].endswith(".py"):
        script = Path(arguments[0])
        if not script.is_file():
            raise ConfigError(
                f"The script must exist. Received: {str(script)!r}, which is not a file in {Path.cwd()}."
                f"{_similar_file(script)}"
            )
    return [name, *arguments]


def _similar_file(path: Path) -> str:
    """Returns a sentence that names a script with a name similar to a missing file's; "" without one."""
    with contextlib.suppress(OSError):
        scripts = {each.name for each in path.parent.iterdir() if each.suffix == ".py"}
        if near := [f"{path.name}.py"] if f"{path.name}.py" in scripts else get_close_matches(path.name, scripts, n=1):
            return f" Did you mean {str(path.with_name(near[0]))!r}?"
    return ""


def parse_env(settings: tuple[str, ...], files: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the variables of NAME=VALUE settings; a bare NAME takes its value from the environment.

    Args:
        files: files with a setting (taken verbatim) or a comment (#) on each line; `settings` take precedence.
    Raises: ConfigError: a setting without a name, a bare NAME that is not set, or a file that cannot be read.
    """
    result = {}
    for origin, number, setting in [*_lines(files), *(("--env", 0, each) for each in settings)]:
        name, equals, value = setting.partition("=")
        if not name or any(map(str.isspace, name)) or "\0" in setting or (not equals and name not in os.environ):
            # Do not show the line itself, which may contain a secret.
            received = repr(setting) if not number else f"line {number} of {origin}, which is neither"
            raise ConfigError(
                f"{'Each line of --env-file' if number else '--env'} must be NAME=VALUE, or the NAME of a variable "
                f"that is set. Received: {received}."
            )
        result[name] = value if equals else os.environ[name]
    return result


def _lines(files: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--env-file must be a file of text that this user may read. Received: {file}: {error}."
            ) from None
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                yield file, number, line
