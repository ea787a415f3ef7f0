"""The hosts of a job, as users name them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keras_ddl.errors import ConfigError


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks it may take."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Returns the hosts of "h0:2,h1:2"; a host without a number takes one rank.

    Raises: ConfigError: an empty name, a number below 1, or a host named twice.
    """
    hosts = []
    for part in text.split(","):
        name, _, number = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "1")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or not number.isdigit() or int(number) < 1:
            raise ConfigError(
                f"hosts must be host:ranks, separated by commas, with 1 or more ranks each. Received: {text!r}. "
                "Example: 'h0:2,h1:2'."
            )
        hosts.append(Host(name, int(number)))
    names = [host.name for host in hosts]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"hosts must name each host once. Received: {text!r}. Give the total number of ranks for each."
        )
    return tuple(hosts)
