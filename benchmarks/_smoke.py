"""Adds the option --smoke to every benchmark: the smallest run that shows that the program works.

The figures of such a run mean nothing. tests/project/benchmarks/test_programs.py runs every program with it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

LACKING = 77  # exit status if this machine lacks something that the program needs


def options_of(parser: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """Adds --smoke to the parser and returns the options of the command line.

    Args:
        smallest: defaults that replace the parser's with --smoke. Options that the user gives still count.
    """
    parser.add_argument("--smoke", action="store_true", help="run as little as possible to test that the program works")
    options = parser.parse_args()
    if unknown := smallest.keys() - vars(options).keys():
        raise TypeError(f"The smallest run may only set existing options. Received: {', '.join(sorted(unknown))}.")
    if options.smoke:
        parser.set_defaults(**smallest)
        options = parser.parse_args()
    return options


def lacking(program: str, what: object) -> int:
    """Prints what the machine lacks for this program, and returns LACKING."""
    print(f"{program}: {what}", file=sys.stderr)
    return LACKING
