"""keras-ddl trace: analyses timelines of a training, in words and as a page. It needs neither TensorFlow nor MPI."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keras_ddl.cli.sizes import size_text

if TYPE_CHECKING:
    from keras_ddl.timeline.summary import Summary

_FILE = click.Path(path_type=Path)


@click.group("trace", short_help="Show where the time of training steps goes, from a timeline.")
def command() -> None:
    """Show where the time of training steps goes, from a timeline.

    \b
    KERAS_DDL_TIMELINE=/tmp/step.json keras-ddl run -np 4 python train.py
    keras-ddl trace summary /tmp/step.json
    keras-ddl trace view /tmp/step.json -o step.html
    """


@command.command("summary")
@click.argument("path", type=_FILE, metavar="FILE_OR_FOLDER")
@click.option("--buckets", default=5, show_default=True, help="Number of slowest collectives shown.", metavar="N")
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON: seconds, bytes, shares of 1.")
def _summary(path: Path, buckets: int, as_json: bool) -> None:
    """Show which ranks delay the others and why, how long steps wait for collectives, and the slowest collectives.

    FILE_OR_FOLDER is the value of KERAS_DDL_TIMELINE, a merged file, or the folder of the ranks' files.
    """
    from keras_ddl.timeline import steps
    from keras_ddl.timeline.summary import summarize
    from keras_ddl.timeline.words import sentences

    summary = summarize(steps.read(path))
    if as_json:
        click.echo(json.dumps({"words": sentences(summary), **asdict(summary)}, indent=1))
        return
    for sentence in sentences(summary):
        click.echo(sentence)
    _show_tables(summary, buckets)


@command.command("view")
@click.argument("path", type=_FILE, metavar="FILE_OR_FOLDER")
@click.option("-o", "--output", type=_FILE, help="[default: FILE.html in its folder]", metavar="FILE.html")
def _view(path: Path, output: Path | None) -> None:
    """Write one HTML file that shows the steps of all ranks, what they wait for, and which ranks are late.

    The file needs no server and no network: open it in a browser, or send it by mail.
    """
    from keras_ddl.timeline import page, steps

    target = output or (path / "trace.html" if path.is_dir() else path.with_suffix(".html"))
    page.write(target, steps.read(path), title=path.name)
    click.echo(f"{target} ({size_text(target.stat().st_size)})")


def _show_tables(summary: Summary, buckets: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from keras_ddl.timeline.words import duration

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(title="Where a step's time goes (means)", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("rank", "host", "step", "input wait", "compute", "exposed", "late ranks", "between", "last in"):
        table.add_column(column, justify="left" if column == "host" else "right")
    late = {each.rank for each in summary.stragglers}
    for each in summary.ranks:
        times = (each.step, each.input, each.compute, each.exposed, each.late_ranks, each.between)
        cells = ["-" if value is None else duration(value) for value in times]
        style = "bold red" if each.rank in late else ""
        table.add_row(str(each.rank), each.host, *cells, f"{each.last:.0%}", style=style)
    console.print(table)
    slowest = summary.buckets[:buckets]
    if not slowest:
        return
    table = Table(title="Slowest collectives (medians)", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("name", overflow="fold")
    for column in ("bytes", "time", "ranks apart", "steps"):
        table.add_column(column, justify="right")
    for row in slowest:
        figures = (size_text(row.bytes), duration(row.seconds), duration(row.ranks_apart), str(row.steps))
        table.add_row(row.name, *figures)
    console.print(table)
