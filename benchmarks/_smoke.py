"""--smoke, an option of every program here: the smallest run that shows that the program works.

Figures of such a run mean nothing. tests/project/benchmarks/test_programs.py runs every program with it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

LACKING = 77  # the exit status of a program that needs what this machine does not have


def options_of(parser: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """Returns the options of the command line, to which it adds --smoke.

    Args:
        smallest: the defaults that --smoke takes in place of the parser's. What the user gives still counts.
    """
    parser.add_argument("--smoke", action="store_true", help="the smallest run, only to test that the program works")
    options = parser.parse_args()
    if unknown := smallest.keys() - vars(options).keys():
        raise TypeError(f"The smallest run sets options that the program has. Received: {', '.join(sorted(unknown))}.")
    if options.smoke:
        parser.set_defaults(**smallest)
        options = parser.parse_args()
    return options


def lacking(program: str, what: object) -> int:
    """Says what the machine lacks for this program; returns the exit status for that."""
    print(f"{program}: {what}", file=sys.stderr)
    return LACKING
