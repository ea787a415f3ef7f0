"""DDL_OPTIONS: the options of IBM's library in one line, such as "-mode p:4x2 -dbg_level 2 -dump_iter 50"."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from keras_ddl.errors import ConfigError

# IBM's algorithms. Only the dimensions matter here, because our algorithm is chosen by measurement.
MODES = {
    "p": "explore and take the best for each dimension",
    "r": "rings",
    "b": "enhanced NCCL",
    "n": "NCCL",
    "m": "MPI's reduce-scatter and all-gather",
    "c": "RCS",
}
_MODE = re.compile(rf"([{''.join(MODES)}])(?::([1-9][0-9]*(?:x[1-9][0-9]*)*))?")
_LIMITS = {"dbg_level": 2, "dump_iter": None, "dev_sync": 2, "rebind_iter": None}


@dataclass(frozen=True)
class Options:
    """The parsed options.

    Attributes:
        mode: the mode for keras_ddl.init; None without -mode.
        dbg_level: 0: silent; 1: rank 0 prints what it runs on; 2: every rank does, and prints what it reduces.
        dump_iter: number of reductions after which times are printed; 0: never.
        dev_sync, rebind_iter: without effect: tensors are in place when an op gets them, and ranks are not bound to
            cores.
    """

    mode: str | None = None
    dbg_level: int = 0
    dump_iter: int = 0
    dev_sync: int = 0
    rebind_iter: int = 0


def parse(text: str) -> Options:
    """Returns the options in `text`.

    Raises: ConfigError: DDL does not have an option (the message names it), a value is missing, or a value is invalid.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"DDL's options must be words in shell syntax. Received: {text!r} ({error}).") from None
    known = ["mode", *_LIMITS]
    values: dict[str, object] = {}
    position = 0
    while position < len(words):
        word = words[position]
        name = word.lstrip("-")
        if not word.startswith("-") or name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"DDL's options are {', '.join('-' + each for each in known)}. Received: {word!r} in {text!r}."
                + (f" The nearest is -{near[0]}." if near else "")
            )
        if position + 1 == len(words):
            raise ConfigError(f"DDL's option {word} must be followed by its value. Received: {text!r}.")
        value = words[position + 1]
        values[name] = translate_mode(value) if name == "mode" else _number(name, value)
        position += 2
    return Options(**values)  # type: ignore[arg-type]


def translate_mode(mode: str) -> str:
    """Returns keras_ddl's mode for IBM's: unchanged if it has dimensions, else 'p'.

    Raises: ConfigError: it is not a mode of IBM's.
    """
    match = _MODE.fullmatch(mode)
    if match is None:
        letters = ", ".join(f"{letter} ({what})" for letter, what in MODES.items())
        raise ConfigError(
            f"-mode must be one of {letters}. Dimensions may follow: ranks of a host x hosts (x racks). "
            f"Received: {mode!r}. Example: 'p:4x2'."
        )
    return mode if match[2] else "p"  # keeps the letter, so that messages show what the user wrote


def group_elements(environ: Mapping[str, str]) -> int | None:
    """Returns DDL_GROUP_SIZE, the largest number of gradient elements in one reduction; None if unset.

    Raises: ConfigError: not a whole number of 1 or more.
    """
    text = environ.get("DDL_GROUP_SIZE", "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise ConfigError(f"DDL_GROUP_SIZE must be a number of elements, 1 or more. Received: {text!r}. Unset it.")
    return int(text) if text else None


def _number(name: str, value: str) -> int:
    limit = _LIMITS[name]
    if not value.isdecimal() or (limit is not None and int(value) > limit):
        rule = "a whole number, 0 or more" if limit is None else f"a whole number from 0 to {limit}"
        raise ConfigError(f"DDL's option -{name} must be {rule}. Received: {value!r}.")
    return int(value)
