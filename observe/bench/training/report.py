"""Writes the table, JSON and plot of `keras-ddl bench train`, and a legend of how each figure was obtained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from keras_ddl.bench.training.prediction import Predicted
from keras_ddl.bench.training.rank import Plan
from keras_ddl.bench.training.rounds import Measurements, Row
from keras_ddl.bench.training.subject import units_of_row

HOW = {
    "step": "measured: milliseconds of a step: the slowest rank's median in each round, then the median of the rounds",
    "speed": "measured: batch / step, of all ranks together",
    "efficiency": "measured: step time of ONE device (plain Keras, no Strategy) divided by this step time; with "
    "--strong also by the number of ranks",
    "communication": "timeline: milliseconds in which sums of gradients ran",
    "exposed": "timeline: the part of comm after the backward pass, for which the step waits",
    "waiting": "timeline: milliseconds after the backward pass in which no sum ran, because other ranks were not ready",
    "on wire": "timeline: share of the gradients' bytes that was summed before the backward pass ended",
    "to accuracy": "measured once: seconds of training until the accuracy was reached, without validation and tracing",
}


def console(file: Any = None) -> Console:
    """Returns the console for tables; without a terminal, tables are not wrapped."""
    result = Console(file=file, highlight=False, soft_wrap=False)
    return result if result.is_terminal else Console(file=file, highlight=False, width=140)


def show(to: Console, plan: Plan, measurements: Measurements, predictions: Sequence[Predicted], rounds: int) -> None:
    """Prints the tables and their legend."""
    unit, per_row = units_of_row(plan.name)
    scaling = "strong scaling: the batch is fixed" if plan.strong else "weak scaling: the batch grows with the ranks"
    device = f"{plan.cores} core(s)" if plan.cores else "all cores that it may use"
    to.print(f"# {plan.name}, {measurements.gradient_bytes / 1e6:.1f} MB of gradients; {scaling}; a device is {device}")
    to.print(f"# {measurements.machine.rsplit(',', 1)[0]}; {rounds} round(s) of {plan.steps} steps each\n")
    columns = ["ranks", "batch", "step ms", f"{unit}/s", "efficiency", "comm ms", "exposed ms", "waiting ms", "on wire"]
    goal = f"to {plan.to_accuracy:g}, s" if plan.to_accuracy is not None else None
    table = _table([*columns, *([goal] if goal else [])])
    for row in measurements.rows:
        cells = [f"{row.ranks}", f"{row.batch}", _ms(row.step), f"{row.rows_per_second * per_row:,.0f}"]
        cells += [f"{row.efficiency:.0%}", _ms(row.communication), _ms(row.exposed), _ms(row.waiting)]
        cells += ["-" if row.wire is None else f"{row.wire:.0%}"]
        table.add_row(*cells, *([_reached(row)] if goal else []))
    to.print(table)
    legend = HOW if goal else {name: text for name, text in HOW.items() if name != "to accuracy"}
    for name, text in legend.items():
        to.print(f"  {name}: {text}")
    for row in measurements.rows:
        if row.sharers > 1:
            to.print(
                f"  {row.ranks} ranks: {row.sharers:g} share a core, so the efficiency is at most {1 / row.sharers:.0%}"
            )
    if predictions:
        to.print("\nPREDICTED, not measured: " + predictions[0].text)
        table = _table(["hosts", "devices", "batch", "step ms", f"{unit}/s", "efficiency"])
        for one in predictions:
            cells = [f"{one.hosts}", f"{one.ranks}", f"{one.batch}", _ms(one.step)]
            table.add_row(*cells, f"{one.rows_per_second * per_row:,.0f}", f"{one.efficiency:.0%}")
        to.print(table)
        to.print(
            "  the measured step of one device, and an all-reduce by the cost model, partly hidden by the backward pass"
        )


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _reached(row: Row) -> str:
    reached = row.reached
    if reached is None:
        return "-"
    if reached.is_reached:
        return f"{reached.seconds:.1f} ({reached.epochs} epochs)"
    return f"not in {reached.epochs} epochs ({reached.accuracy:.2f})"


def as_json(plan: Plan, measurements: Measurements, predictions: Sequence[Predicted], rounds: int) -> dict[str, Any]:
    """Returns all figures for a file, in seconds and bytes."""
    unit, per_row = units_of_row(plan.name)
    return {
        "plan": dataclasses.asdict(plan) | {"rounds": rounds},
        "machine": measurements.machine.rsplit(",", 1)[0],
        "gradient_bytes": measurements.gradient_bytes,
        "unit": unit,
        "units_of_row": per_row,
        "how": HOW | {"predicted": "by keras_ddl.cost_model from the measured step of one device"},
        "measured": [dataclasses.asdict(row) for row in measurements.rows],
        "predicted": [dataclasses.asdict(one) for one in predictions],
    }


def plot(file: str, plan: Plan, measurements: Measurements, predictions: Sequence[Predicted]) -> None:
    """Draws step time and efficiency over the devices. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    steps, efficiencies = figure.subplots(1, 2)
    series: list[tuple[str, str, Sequence[Any]]] = [("measured here", "o-", measurements.rows)]
    if predictions:
        series.append((f"predicted: {predictions[0].text}", "x--", predictions))
    for label, style, rows in series:
        ranks = [row.ranks for row in rows]
        steps.plot(ranks, [1e3 * row.step for row in rows], style, label=label)
        efficiencies.plot(ranks, [100 * row.efficiency for row in rows], style, label=label)
    with_traffic = [row for row in measurements.rows if row.exposed is not None]
    if with_traffic:
        exposed = [1e3 * row.exposed for row in with_traffic if row.exposed is not None]
        steps.plot([row.ranks for row in with_traffic], exposed, ".:", label="exposed communication")
    ticks = sorted({row.ranks for _, _, rows in series for row in rows})
    for axes, label in ((steps, "ms of a step"), (efficiencies, "efficiency, % of one device's")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, map(str, ticks))
        axes.set(xlabel="devices", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    steps.legend(fontsize="small")
    figure.suptitle(plan.name)
    figure.savefig(file)
