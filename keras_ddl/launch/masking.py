"""Hides passwords and the like where command lines and variables are shown: `--dry-run`, `--verbose`, the event log."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_NAMES = "KEY|TOKEN|SECRET|PASSW|CREDENTIAL"
_SECRET = re.compile(_NAMES, re.IGNORECASE)
_ASSIGNED = re.compile(rf"([\w.-]*(?:{_NAMES})[\w.-]*=).+", re.IGNORECASE | re.DOTALL)
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Whether a variable of this name is not to be shown."""
    return _SECRET.search(name) is not None


def hidden(words: Sequence[str]) -> list[str]:
    """Returns `words` with what follows `NAME=` hidden, to the end of the word, where NAME is secret."""
    return [_ASSIGNED.sub(rf"\1{HIDDEN}", word) for word in words]


def shown(command: Sequence[str]) -> str:
    """Returns a command line as a shell reads it, with `hidden` words."""
    return shlex.join(hidden(command))
