"""Hides secrets where command lines and variables are shown: `--dry-run`, `--verbose`, the event log."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_NAMES = "KEY|TOKEN|SECRET|PASSW|CREDENTIAL"
_SECRET = re.compile(_NAMES, re.IGNORECASE)
_NAME = rf"[\w.-]*(?:{_NAMES})[\w.-]*"
_OPTION = re.compile(rf"-{_NAME}", re.IGNORECASE)
# Matches NAME= or --NAME and the rest of the word, which may be a shell's command line.
_IN_WORD = re.compile(rf"({_NAME}=|(?<!\S)-{_NAME}\s+(?!-)).+", re.IGNORECASE | re.DOTALL)
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Whether the value of a variable of this name must be hidden."""
    return _SECRET.search(name) is not None


def hidden(words: Sequence[str]) -> list[str]:
    """Returns `words` with the values of secret names hidden: `NAME=value`, `--NAME value`.

    In a word with spaces, as after `sh -c`, the rest after the first secret name is hidden. A word that begins with `-`
    is the next option, not a value.
    """
    without = [_IN_WORD.sub(rf"\1{HIDDEN}", word) for word in words]
    for place, (option, value) in enumerate(zip(words, words[1:]), start=1):
        if _OPTION.fullmatch(option) and not value.startswith("-"):
            without[place] = HIDDEN
    return without


def shown(command: Sequence[str]) -> str:
    """Returns a command line as a shell reads it, with `hidden` words."""
    return shlex.join(hidden(command))
