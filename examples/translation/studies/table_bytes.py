"""Bytes of the gradient of the table that a Transformer's encoder, decoder and projection share, by number of ranks.

    python -m translation.studies.table_bytes

The gradient has one row for each position that was looked up, and the projection adds one row for each row of the
table. A gradient that is treated as sparse is gathered, so each rank holds the rows of all ranks:
ranks x (table's rows + lookups per rank). A gradient that is added up to one table has the size of the table on any
number of ranks.

TensorFlow 1 treated the sum as sparse. Cavdar et al. (2019, arXiv 1905.04035) made it dense on 64 ranks: 11,446 MB
became 139 MB, 82 times less, and the accumulation took 169 ms instead of 4,320 ms. Their big Transformer has a table of
33,945 rows of 1,024 float32, and a rank's batch has up to 5,000 tokens of each language. TensorFlow 2 adds up to a
dense tensor, and keras_ddl gathers no slices of a whole table (docs/strategy.md).

This command measures steps on real ranks, which it starts: first with slices of everything gathered in Horovod's
manner, then under keras_ddl.Strategy. The table's rows and the tokens are a tenth of the paper's, so that the ratios
are the same. It computes the same numbers for more ranks, and for the paper's sizes.
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

# From arXiv 1905.04035. Rows and tokens are from its authors' command; the number of lookups is an upper limit.
PAPER = {"rows": 33_945, "width": 1_024, "lookups": 2 * 5_000, "ranks": 64}
PUBLISHED = {"gathered": 11_446_000_000, "table": 139_000_000}


def gathered_bytes(ranks: int, rows: int, width: int, lookups: float) -> int:
    """Returns the bytes of gathered slices on a rank: float32, with int32 indices.

    Args:
        rows, width: sizes of the table. lookups: lookups per rank, the mean over ranks.
    """
    return round(ranks * (rows + lookups) * (4 * width + 4))


def table_bytes(rows: int, width: int) -> int:
    """Returns the bytes of one table of float32."""
    return rows * width * 4


def row(how: str, ranks: int, rows: int, width: int, lookups: float, gathered: int, table: int) -> Row:
    """Returns a row of the study. gathered, table: bytes on a rank."""
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
    """Trains on the numbers of ranks in the options, and returns a row for each."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        paths = corpus.make(folder, train=20 * options.tokens, dev=1, test=1)["train"]
        arguments = (paths, options.rows, options.width, options.tokens, options.steps)
        for ranks in options.ranks:
            print(f"starting {ranks} rank(s)", file=sys.stderr)
            quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
            everyone = keras_ddl.run(both_ways, np=ranks, args=arguments, env=quiet)
            # All ranks hold the same; take the step with the most lookups.
            most = max(everyone[0], key=lambda step: step["lookups"])
            lookups = most["lookups"] / ranks
            found.append(row("measured", ranks, options.rows, options.width, lookups, most["gathered"], most["table"]))
    return found


def computed(ranks: int, rows: int, width: int, lookups: float) -> Row:
    """Returns a row of the study from sizes alone."""
    gathered = gathered_bytes(ranks, rows, width, lookups)
    return row("computed", ranks, rows, width, lookups, gathered, table_bytes(rows, width))


def study(options: argparse.Namespace) -> list[Row]:
    """Returns all rows: measured on this machine's ranks, computed for more ranks, and for the paper's sizes."""
    found = measured(options)
    lookups = max(each["lookups a rank"] for each in found)
    more = [ranks for ranks in (2, 4, 8, 16, 32, 64) if ranks > max(options.ranks)]
    found += [computed(ranks, options.rows, options.width, lookups) for ranks in more]
    found.append(computed(**PAPER))
    found.append(row("published", **PAPER, **PUBLISHED))
    return found


def draw(figure: Any, found: Sequence[Row]) -> None:
    """Draws the size of the gradient on a rank, in tables, over the number of ranks."""
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
    parser = argparse.ArgumentParser(
        parents=[rows_of.options("table_bytes")],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of ranks (1 2 4 8)")
    parser.add_argument("--rows", type=int, default=PAPER["rows"] // 10, help="rows of the table (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="width of the table (%(default)s)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=PAPER["lookups"] // 10,
        help="tokens of a rank's batch, in both languages (%(default)s)",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of each training (%(default)s)")
    options = rows_of.parse(parser, arguments)
    rows_of.show(study(options), options, draw)


if __name__ == "__main__":
    main()
