"""keras-ddl bench train: measures how training scales, with the modules in training/."""

from __future__ import annotations

import json
from pathlib import Path

import click

from keras_ddl import packages, parts
from keras_ddl.bench import machine_load
from keras_ddl.bench.training.networks import NETWORKS
from keras_ddl.errors import ConfigError

_COUNT = click.IntRange(min=1)


class _Ranks(click.ParamType):
    name = "N,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.isdigit() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is not a list of numbers of ranks such as 1,2,4", param, ctx)
        return tuple(sorted({1, *map(int, words)}))  # efficiency is relative to one device


@click.command("train", short_help="Measure how training scales.")
@click.argument("subject", required=False, metavar="[MODULE:FUNCTION]")
@click.option("--network", type=click.Choice(list(NETWORKS)), help="A built-in network instead of a function (cnn).")
@click.option(
    "--ranks", type=_Ranks(), default="1,2", show_default=True, help="Numbers of ranks; 1 is always measured."
)
@click.option("--hosts", "-H", help="Hosts and the ranks each takes, as in h0:4,h1:4.", metavar="HOSTS")
@click.option("--batch", type=_COUNT, help="Rows per rank; with --strong, rows of all ranks.", metavar="ROWS")
@click.option("--strong", is_flag=True, help="Strong scaling: one batch size for any number of ranks.")
@click.option("--steps", type=click.IntRange(min=2), default=12, show_default=True, help="Steps in each round.")
@click.option("--rounds", type=_COUNT, default=3, show_default=True, help="How often each number of ranks is measured.")
@click.option("--cores", type=click.IntRange(min=0), default=1, show_default=True,
              help="Cores per device; 0: all that a rank may use, which suits GPUs.")  # fmt: skip
@click.option("--to-accuracy", type=click.FloatRange(0, 1, min_open=True), metavar="A",
              help="Also train to this accuracy (on validation data, if there is any).")  # fmt: skip
@click.option("--epochs", type=_COUNT, default=20, show_default=True, help="Maximum epochs for --to-accuracy.")
@click.option("--predict", metavar="LINKS",
              help="Also predict other hosts: hosts=64,devices=4,link=100Gb[,inside=40GB][,latency=5us].")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write the figures to this file too.")
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False), help="Draw the figures to this file (matplotlib)."
)
def command(
    subject: str | None,
    network: str | None,
    ranks: tuple[int, ...],
    hosts: str | None,
    batch: int | None,
    strong: bool,
    steps: int,
    rounds: int,
    cores: int,
    to_accuracy: float | None,
    epochs: int,
    predict: str | None,
    json_file: str | None,
    plot_file: str | None,
) -> int:
    """Measure the steps of a training on 1, 2, ... ranks: efficiency against one device, and exposed communication.

    \b
    keras-ddl bench train --network resnet --ranks 1,2,4
    keras-ddl bench train train:subject --ranks 2 --batch 32 --to-accuracy 0.9 --json train.json
    keras-ddl bench train --network mlp --predict hosts=64,devices=4,link=100Gb --plot train.svg

    MODULE:FUNCTION is called on every rank with the number of rows of a global batch, and returns (model, data) or
    (model, data, validation): a compiled model and data for its fit. The command starts the ranks itself: in every
    round, a job for each number of ranks. A legend says how each figure was obtained, and predictions are marked.
    See observe/bench/docs/bench.md.
    """
    from keras_ddl.bench.training import prediction, report
    from keras_ddl.bench.training import rounds as turns
    from keras_ddl.bench.training import subject as subjects
    from keras_ddl.bench.training.rank import Plan

    if subject is not None and network is not None:
        raise ConfigError(
            f"bench train: give either --network or MODULE:FUNCTION. Received: --network {network} and {subject}. "
            "Leave one out."
        )
    name = subject or network or "cnn"
    subjects.check(name)
    if plot_file and packages.missing(["matplotlib"]):
        raise ConfigError(
            "--plot needs matplotlib. Received: an environment without it. Install it: "
            f"{packages.pip_install('matplotlib')}"
        )
    if batch is None:
        batch = NETWORKS[name].batch * (max(ranks) if strong else 1) if name in NETWORKS else 32
    if strong and batch < max(ranks):
        raise ConfigError(
            f"bench train: with --strong, --batch must be at least one row per rank. Received: --batch {batch} for "
            f"{max(ranks)} ranks."
        )
    if predict:
        parts.need("cost_model")
    links = prediction.parse(predict) if predict else None
    plan = Plan(name, batch, strong, steps, cores, to_accuracy, epochs)

    if hosts is None and (busy := machine_load.before()):
        click.echo(f"keras-ddl bench train: {busy}", err=True)
    watch, own = machine_load.Watch(), machine_load.own_seconds()
    measurements = turns.measured(plan, ranks, rounds, hosts, lambda text: click.echo(text, err=True))
    load = watch.load(machine_load.own_seconds() - own)
    if hosts is None and (busy := load.warning("while this was measured")):
        click.echo(f"keras-ddl bench train: {busy}", err=True)
    predictions = prediction.predicted(plan, measurements, links) if links else []
    report.show(report.console(), plan, measurements, predictions, rounds)
    if json_file:
        content = report.as_json(plan, measurements, predictions, rounds)
        Path(json_file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if plot_file:
        report.plot(plot_file, plan, measurements, predictions)
    return 0
