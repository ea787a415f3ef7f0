"""Types of options: rarely needed ones, settings for files, and the number of ranks."""

from __future__ import annotations

import re
from typing import Any

import click


class Rare(click.Option):
    """An option that only --help-all shows."""


class InFile(Rare):
    """A setting for --config files only."""


class Ranks(click.ParamType):
    """A number of ranks N, or a range MIN:MAX, as (least, most). N is (None, N); MIN: is (MIN, None)."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(?:(\d+):)?(\d*)", str(value))
        least, most = (int(each) if each else None for each in match.groups()) if match else (None, None)
        if least == 0 or most == 0 or (least is None and most is None) or (least or 0) > (most or least or 0):
            self.fail(f"{value!r} is neither a number of ranks, 1 or more, nor a range such as 2:4.", param, ctx)
        return least, most
