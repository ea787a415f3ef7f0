"""Bytes of the gradient of the table that a Transformer's encoder, decoder and projection share, by number of ranks.

    python -m translation.studies.table_bytes

The gradient has a row for each position that was looked up, and, of the projection, a row for each of the table. What
is taken for sparse is gathered: each rank then holds the rows of all, ranks x (table's rows + lookups of a rank).
What is added up to one table stays that table, whatever the number of ranks.

TensorFlow 1 took the sum for sparse. Cavdar et al. (2019, arXiv 1905.04035) made it dense on 64 ranks: 11,446 MB became
139 MB, 82 times less, and the accumulation took 169 ms instead of 4,320. Their big Transformer has a table of 33,945
rows of 1,024 float32, and a rank's batch up to 5,000 tokens of each language. TensorFlow 2 adds up to a dense tensor,
and keras_ddl gathers no slices of a whole table (docs/strategy.md).

Measured here: steps on real ranks, which this command starts, with slices of everything gathered in Horovod's manner,
and again under keras_ddl.Strategy. The table's rows and the tokens are a tenth of those above, so that the ratios are
the same. Computed: the same for more ranks, and what the paper's sizes come to.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import keras_ddl
from translation import corpus
from translation.studies import rows as rows_of
from translation.studies.rows import LOOKS, Row
from translation.studies.tied_table import both_ways

# Of arXiv 1905.04035 and, rows and tokens, of the command with which its authors trained. Lookups are at most so many.
PAPER = {"rows": 33_945, "width": 1_024, "lookups": 2 * 5_000, "ranks": 64}
PUBLISHED = {"gathered": 11_446_000_000, "table": 139_000_000}


def gathered_bytes(ranks: int, rows: int, width: int, lookups: float) -> int:
    """Returns what a rank holds of slices of float32 with their indices, int32.

    Args:
        rows, width: of the table. lookups: of a rank, the mean over ranks.
    """
    return round(ranks * (rows + lookups) * (4 * width + 4))


def table_bytes(rows: int, width: int) -> int:
    """Returns what a rank holds of one table of float32."""
    return rows * width * 4


def row(how: str, ranks: int, rows: int, width: int, lookups: float, gathered: int, table: int) -> Row:
    """Returns a row of the study. gathered, table: bytes that a rank holds."""
    return {
        "ranks": ranks,
        "table": f"{rows:,} x {width:,}",
        "lookups a rank": round(lookups),
        "gathered, MB": gathered / 1e6,
        "one table, MB": table / 1e6,
        "times less": gathered / table,
        "how": how,
    }


def measured(options: argparse.Namespace) -> list[Row]:
    """Trains on as many ranks as the options say, and returns a row for each number of them."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        paths = corpus.make(folder, train=20 * options.tokens, dev=1, test=1)["train"]
        arguments = (paths, options.rows, options.width, options.tokens, options.steps)
        for ranks in options.ranks:
            print(f"starting {ranks} rank(s)", file=sys.stderr)
            quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
            everyone = keras_ddl.run(both_ways, np=ranks, args=arguments, env=quiet)
            # What all ranks hold is the same; of the steps, the one with most lookups.
            most = max(everyone[0], key=lambda step: step["lookups"])
            lookups = most["lookups"] / ranks
            found.append(row("measured", ranks, options.rows, options.width, lookups, most["gathered"], most["table"]))
    return found


def computed(ranks: int, rows: int, width: int, lookups: float) -> Row:
    """Returns a row of the study from sizes alone."""
    gathered = gathered_bytes(ranks, rows, width, lookups)
    return row("computed", ranks, rows, width, lookups, gathered, table_bytes(rows, width))


def study(options: argparse.Namespace) -> list[Row]:
    """Returns all rows: those of this machine's ranks, the same for more, and those of the paper."""
    found = measured(options)
    lookups = max(each["lookups a rank"] for each in found)
    more = [ranks for ranks in (2, 4, 8, 16, 32, 64) if ranks > max(options.ranks)]
    found += [computed(ranks, options.rows, options.width, lookups) for ranks in more]
    found.append(computed(**PAPER))
    found.append(row("published", **PAPER, **PUBLISHED))
    return found


def draw(figure: Any, found: Sequence[Row]) -> None:
    """Draws what a rank holds of the gradient, in tables, over the ranks."""
    axes = figure.subplots()
    ranks = sorted({each["ranks"] for each in found})
    axes.plot(ranks, [1] * len(ranks), color="tab:gray", label="one table: what keras_ddl.Strategy holds")
    for how, table in dict.fromkeys((each["how"], each["table"]) for each in found):
        some = [each for each in found if (each["how"], each["table"]) == (how, table)]
        points = sorted((each["ranks"], each["times less"]) for each in some)
        axes.plot(*zip(*points), **LOOKS[how], label=f"slices, gathered: {how} ({table})")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="gradient of the shared table on a rank, in tables")
    axes.set_xticks(ranks, ranks)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        parents=[rows_of.options("table_bytes")],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="to start (1 2 4 8)")
    parser.add_argument("--rows", type=int, default=PAPER["rows"] // 10, help="of the table (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the table (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=PAPER["lookups"] // 10, help="of a rank's batch, both languages (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=3, help="of each training (%(default)s)")
    options = rows_of.parse(parser, arguments)
    rows_of.show(study(options), options, draw)


if __name__ == "__main__":
    main()
