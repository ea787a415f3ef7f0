"""Prints, saves and draws the rows of a study.

A row is a dict of columns. Names of columns contain units, and the column `how` says where the numbers come from:

    measured   by this command, on this machine
    emulated   by this command, on ranks with a slowed-down network (tools/emulated_cluster.py)
    predicted  by a cost model, from measurements
    computed   from sizes alone, exactly
    published  by somebody else, for other machines; the study names the source

A study consists of these lines,

    parser = argparse.ArgumentParser(parents=[rows.options("table_bytes")], description=__doc__, ...)
    chosen = rows.parse(parser)
    rows.show(found, chosen, draw)

and a function `draw(figure, found)`, which draws the rows into a matplotlib figure, with LOOKS for each `how`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Arguments of matplotlib's plot for each `how`, the same in all pictures.
LOOKS = {
    "measured": {"marker": "o", "linestyle": "-", "color": "tab:blue"},
    "emulated": {"marker": "s", "linestyle": "-", "color": "tab:cyan"},
    "predicted": {"marker": "x", "linestyle": "--", "color": "tab:orange"},
    "computed": {"marker": ".", "linestyle": ":", "color": "tab:green"},
    "published": {"marker": "D", "linestyle": "none", "color": "black"},
}


def options(name: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that all studies share, as the parent of the parser of the study `name`."""
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parent.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        default=Path(f"{name}.svg"),
        help="file of the picture, .svg, .png or .pdf (default: %(default)s)",
    )
    parent.add_argument("--no-plot", dest="plot", action="store_const", const=None, help="draw no picture")
    return parent


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command. Exits now, not after minutes, if the picture could not be drawn."""
    chosen = parser.parse_args(arguments)
    if chosen.plot is not None:
        if chosen.plot.suffix not in (".svg", ".png", ".pdf"):
            parser.error(f"--plot: the file must end in .svg, .png or .pdf. Received: {chosen.plot}")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot: the picture needs matplotlib. Run pip install matplotlib, or use --no-plot.")
    return chosen


def table(found: Sequence[Row]) -> str:
    """Returns the rows as text, with a column for each key, in the order in which the keys first occur."""
    columns = list(dict.fromkeys(column for row in found for column in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in found]
    lines = [columns, *cells]
    widths = [max(map(len, column)) for column in zip(*lines)]
    right = [any(isinstance(row.get(column), (int, float)) for row in found) for column in columns]
    return "\n".join(
        "  ".join(text.rjust(width) if on_right else text.ljust(width) for text, width, on_right in zip(*line)).rstrip()
        for line in ((texts, widths, right) for texts in lines)
    )


def show(found: Sequence[Row], chosen: argparse.Namespace, draw: Callable[[Any, Sequence[Row]], None]) -> None:
    """Prints the rows, and saves and draws them according to the options.

    Raises: ValueError: a row has no valid `how`.
    """
    for row in found:
        if row.get("how") not in LOOKS:
            raise ValueError(f"how: a row must say one of {', '.join(LOOKS)}. Received: {row}")
    print(table(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(list(found), indent=1) + "\n")
    if chosen.plot is not None:
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"svg.hashsalt": chosen.plot.stem, "svg.fonttype": "none"}):
            figure = Figure(figsize=(8, 5), layout="constrained")
            draw(figure, found)
            # Without a date, so that the same rows make the same file.
            figure.savefig(chosen.plot, dpi=150, metadata={"Date": None} if chosen.plot.suffix == ".svg" else None)
        print(f"picture: {chosen.plot}")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int):  # before floats: counts and bytes are exact
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
