"""Draws the pictures of examples/images/README.md from the results of study.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawing
import matplotlib
import numpy as np
import published
from matplotlib.figure import Figure

COLORS = {"same rate": "tab:gray", "linear scaling": "tab:orange", "linear scaling and warm-up": "tab:blue"}


def tables(results: dict[str, Any]) -> str:
    """Returns the results as the tables of examples/images/README.md."""
    lines = []
    if runs := results.get("accuracy", {}).values():
        lines += ["| global batch | " + " | ".join(COLORS) + " |", "|---" * (1 + len(COLORS)) + "|"]
        for batch in sorted({run["batch"] for run in runs}):
            mine = {run["arm"]: f"{100 * run['val_accuracy'][-1]:.1f} %" for run in runs if run["batch"] == batch}
            lines.append(f"| {batch:,} | " + " | ".join(mine.get(arm, "") for arm in COLORS) + " |")
    if result := results.get("time"):
        lines += [
            "",
            "| ranks | global batch | step | pictures/s | efficiency | exposed | time | epochs |",
            "|---" * 8 + "|",
        ]
        for row in result["measured"]:
            exposed = "" if row["exposed"] is None else f"{1e3 * row['exposed']:.1f} ms"
            cells = [row["ranks"], row["batch"], f"{1e3 * row['step']:.1f} ms", f"{row['rows_per_second']:,.0f}"]
            cells += [f"{row['efficiency']:.0%}", exposed]
            cells += [f"{row['reached']['seconds']:.1f} s", row["reached"]["epochs"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any], folder: Path) -> None:
    """Writes classes.png, accuracy.svg, time.svg and predicted.svg; leaves out pictures without results."""
    _save(folder / "classes.png", (8, 4.4), classes)
    if results.get("accuracy"):
        _save(folder / "accuracy.svg", (8, 3.6), lambda figure: accuracy(figure, results["accuracy"]))
    if results.get("time"):
        _save(folder / "time.svg", (8, 3.2), lambda figure: time(figure, results["time"]))
    _save(folder / "predicted.svg", (8, 3.6), predicted)


def _save(file: Path, size: tuple[float, float], fill: Callable[[Figure], None]) -> None:
    with matplotlib.rc_context({"svg.hashsalt": file.stem, "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        fill(figure)
        # Without a date, so that the same results make the same file.
        figure.savefig(file, dpi=72, metadata={"Date": None} if file.suffix == ".svg" else None)
    print(f"picture: {file}")


def classes(figure: Figure) -> None:
    """Shows each of the 200 classes once: a row for each shape, a column for each texture."""
    images, labels = drawing.draw(2 * drawing.CLASSES, seed=5)
    chosen = images[[np.flatnonzero(labels == label)[0] for label in range(drawing.CLASSES)]]
    rows, size = len(drawing.SHAPES), drawing.SIZE
    padded = np.pad(chosen, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=255)
    sheet = padded.reshape(rows, -1, size + 2, size + 2, 3).swapaxes(1, 2).reshape(rows * (size + 2), -1, 3)
    axes = figure.subplots()
    axes.imshow(sheet, interpolation="nearest")
    axes.set_axis_off()


def accuracy(figure: Figure, results: dict[str, Any]) -> None:
    """Draws the final accuracy against the batch, and the curves of the largest batch that was trained in all ways."""
    left, right = figure.subplots(1, 2)
    runs = list(results.values())
    base = next((run for run in runs if run["batch"] == min(one["batch"] for one in runs)), runs[0])
    every = sorted({run["batch"] for run in runs})
    largest = max(every, key=lambda batch: (sum(run["batch"] == batch for run in runs), batch))
    for arm, color in COLORS.items():
        mine = {run["batch"]: run for run in runs if run["arm"] == arm} | {base["batch"]: base}
        batches = sorted(mine)
        left.plot(batches, [100 * mine[batch]["val_accuracy"][-1] for batch in batches], "o-", color=color, label=arm)
        if largest in mine:
            curve = mine[largest]["val_accuracy"]
            right.plot(range(1, len(curve) + 1), [100 * value for value in curve], ".-", color=color)
    left.set_xscale("log", base=2)
    left.set_xticks(every, map(str, every))
    left.minorticks_off()
    left.set(xlabel="global batch", ylabel="held-out accuracy in the end, %", ylim=(0, 100))
    right.set(xlabel="epoch", ylabel=f"held-out accuracy, %, batch {largest}", ylim=(0, 100))
    left.legend(fontsize="small", loc="lower left")
    for axes in (left, right):
        axes.grid(alpha=0.3)


def time(figure: Figure, result: dict[str, Any]) -> None:
    """Draws the time to the accuracy and the pictures per second against the ranks."""
    left, right = figure.subplots(1, 2)
    rows = [row for row in result["measured"] if row["reached"]]
    ranks = [row["ranks"] for row in rows]
    left.bar(range(len(rows)), [row["reached"]["seconds"] for row in rows], color="tab:blue", width=0.6)
    for place, row in enumerate(rows):
        reached = row["reached"]
        left.annotate(f"{reached['seconds']:.0f} s\n{reached['epochs']} epochs", (place, reached["seconds"] / 2),
                      ha="center", color="white", fontsize="small")  # fmt: skip
    left.set_xticks(range(len(rows)), [f"{row['ranks']}\n(batch {row['batch']})" for row in rows])
    left.set(xlabel="ranks", ylabel=f"seconds to {100 * result['plan']['to_accuracy']:.0f} %")
    right.plot(ranks, [row["rows_per_second"] for row in rows], "o-", label="measured")
    right.plot(ranks, [count * rows[0]["rows_per_second"] for count in ranks], ":", color="gray", label="ideal")
    right.set(xlabel="ranks", ylabel="pictures per second")
    right.set_xticks(ranks)
    right.set_ylim(bottom=0)
    right.legend(fontsize="small")
    right.grid(alpha=0.3)


def predicted(figure: Figure) -> None:
    """Draws the predicted and the published efficiency against the number of devices."""
    rows = published.predictions()
    for axes, network in zip(figure.subplots(1, 2, sharey=True), published.NETWORKS):
        for overlap, style in ((0.0, "x--"), (0.5, "+:")):
            mine = [row for row in rows if row["network"] == network.name and row["overlap"] == overlap]
            label = "predicted, nothing hidden" if not overlap else "predicted, half of computing hides"
            axes.plot([row["devices"] for row in mine], [100 * row["efficiency"] for row in mine], style, label=label)
        for one in published.PUBLISHED:
            if one["network"] == network.name and "efficiency" in one:
                axes.plot([one["devices"]], [100 * one["efficiency"]], "D", label=f"published: {one['what']}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(published.DEVICES, map(str, published.DEVICES))
        axes.set(title=network.name, xlabel="devices", ylabel="efficiency, %", ylim=(0, 105))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="lower left")
