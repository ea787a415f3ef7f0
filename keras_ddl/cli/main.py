"""The group of commands. An error is one message on stderr, with a traceback only if --debug is given."""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import NoReturn

import click

from keras_ddl import parts
from keras_ddl.errors import ConfigError, KerasDdlError
from keras_ddl.launch.output.sinks import open_standard_streams

# Module and help line, so that --help imports no module. Parts add commands between these two.
_FIRST = {"run": ("keras_ddl.cli.run", "Run a program on several ranks.")}
_LAST = {"info": ("keras_ddl.cli.info", "Show versions, MPI, the machine, its GPUs and the settings.")}
_USAGE_STATUS = 2


def _commands() -> dict[str, tuple[str, str]]:
    part_commands = {
        name: (row["module"], row["help"]) for part in parts.installed() for name, row in part.commands.items()
    }
    return {**_FIRST, **part_commands, **_LAST}


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_commands())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in _commands():
            return importlib.import_module(_commands()[name][0]).command
        if parts.is_missing(name):
            ctx.fail(parts.why_missing(name))
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _commands().items()])


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import keras_ddl

        click.echo(f"keras_ddl {keras_ddl.__version__}")
        ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error of keras-ddl itself.")
@click.option(
    "--version", is_flag=True, callback=_show_version, expose_value=False, is_eager=True, help="Show the version."
)
def group() -> None:
    """Train a Keras 3 script on several processes, with the weights of one.

    \b
    with keras_ddl.Strategy().scope():          put this around the lines that make and compile the model
    keras-ddl run -np 2 python train.py         train on 2 ranks of this machine
    keras-ddl export ckpt/ saved_model/         make a SavedModel of the newest checkpoint
    """


def main(argv: list[str] | None = None) -> None:
    """Runs the command line and exits with 0, the status of a failed rank, 1 for an error, or 2 for wrong usage."""
    arguments = sys.argv[1:] if argv is None else argv
    # Only before the command: after it, the option may be the program's.
    debug = "--debug" in itertools.takewhile(lambda word: word.startswith("-"), arguments)
    run_and_exit(group, "keras-ddl", arguments, debug=debug)


def ddlrun() -> NoReturn:
    """Runs the command `ddlrun` if its part is installed."""
    for start in parts.provided("ddlrun"):
        start()
    click.echo(f"ddlrun: {parts.why_missing('ddlrun')}", err=True)
    sys.exit(1)


def run_and_exit(command: click.Command, name: str, arguments: list[str] | None, *, debug: bool = False) -> NoReturn:
    """Runs a command under the name `name`, and exits as `main` does. `debug`: raise keras_ddl's errors."""
    open_standard_streams()
    try:
        status = command.main(args=arguments, prog_name=name, standalone_mode=False)
    except click.exceptions.Abort:
        status = 130
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (KerasDdlError, OSError) as error:
        if debug:
            raise
        click.echo(f"{name}: {type(error).__name__}: {error}", err=True)
        status = _USAGE_STATUS if isinstance(error, ConfigError) else 1
    sys.exit(status if isinstance(status, int) else 0)
