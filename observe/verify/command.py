"""keras-ddl verify: checks that a program gives the same results on several ranks as in one process."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import click

from keras_ddl.cli.run import complete_files, environment_options, parse_env, resolve_program
from keras_ddl.errors import ConfigError

_PRECISIONS = {"both": ("", "float64"), "own": ("",), "float64": ("float64",)}


class _Command(click.Command):
    """Options may follow the program, as in `keras-ddl verify train.py -np 3`; the program's own come after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = (
                f"{error.message} If it is an option of the program, write it after --, as in: "
                f"keras-ddl verify -np 3 -- train.py {error.option_name}"
            )
            raise click.NoSuchOption(error.option_name, message, error.possibilities, ctx) from None


@click.command(
    "verify",
    cls=_Command,
    short_help="Prove that ranks compute what one process computes.",
)
@click.option(
    "-np",
    "--np",
    "-n",
    "num_ranks",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Number of ranks, on this host.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Training steps to compare; then the program is ended.",
)
@click.option(
    "--epoch-steps",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    metavar="N",
    help="Batches to run of each epoch, evaluation and prediction; 0: all.",
)
@click.option(
    "--precision",
    type=click.Choice(list(_PRECISIONS)),
    default="both",
    show_default=True,
    help="The program's own precision, Keras's floatx set to float64, or both in turn.",
)
@click.option("--seed", type=int, default=1708, show_default=True, help="Seed for programs that set none.", metavar="N")
@click.option(
    "--timeout", type=float, default=600.0, show_default=True, help="Time limit of each run.", metavar="SECONDS"
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the certificate here.", metavar="FILE"
)
@click.option("--keep", type=click.Path(file_okay=False), help="Keep recordings and output here.", metavar="DIR")
@environment_options
@click.option("--verbose", "-v", is_flag=True, help="Show the program's output.")
@click.argument(
    "program",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[--] PROGRAM [ARGUMENTS]...",
    shell_complete=complete_files,
)
def command(
    num_ranks: int,
    steps: int,
    epoch_steps: int,
    precision: str,
    seed: int,
    timeout: float,
    json_file: str | None,
    keep: str | None,
    env: tuple[str, ...],
    env_files: tuple[str, ...],
    verbose: bool,
    program: tuple[str, ...],
) -> int:
    """Run PROGRAM for some steps as one process and on several ranks, compare, and print a certificate.

    \b
    keras-ddl verify train.py -np 3
    keras-ddl verify -np 4 --steps 50 --json certificate.json -- train.py --epochs 3

    It compares weights, optimizer slots, logs and outputs after each training step, in the program's own precision and
    in float64. It measures how much rounding alone changes them: one process runs again with weights perturbed by one
    ulp. The program is not changed. It runs in a copy of the working directory, without callbacks that write files or
    resume. Files at absolute paths, above the working directory (..) or behind links to directories outside are really
    written.

    The exit status is 0 if the results are equal, 1 if they differ, 2 if that is unknown: wrong usage, or a program
    that does not train, fails, or is not deterministic.
    """
    from keras_ddl.verify import certificate
    from keras_ddl.verify.runs import Program
    from keras_ddl.verify.verification import EXIT_STATUS, Verifier

    command_line = resolve_program(program, local=True)
    folder = Path(keep or tempfile.mkdtemp(prefix="keras-ddl-verify-"))
    folder.mkdir(parents=True, exist_ok=True)
    if some := sorted(each.name for each in folder.iterdir()):
        raise ConfigError(
            "--keep needs a directory that is empty or does not exist, so that recordings of two verifications are not "
            f"mixed. Received: {keep}, which contains {some[0]}. Empty the directory, or name another one."
        )
    described = Program(command_line, parse_env(env, env_files), timeout, epoch_steps, verbose)

    def say(text: str) -> None:
        click.echo(f"keras-ddl verify: {text}", err=True)

    try:
        verification = Verifier(described, num_ranks, steps, seed, folder.resolve(), say).verify(_PRECISIONS[precision])
        made = certificate.as_json(verification, ["keras-ddl", *sys.argv[1:]])
        if json_file is not None:
            Path(json_file).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        click.echo(certificate.as_text(made))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return EXIT_STATUS[verification.verdict]
