"""Host files of Open MPI and Horovod (`n1 slots=4`), of MPICH (`n1:4`), of Slurm (`n[01-03,07]`, one line a task)."""

from __future__ import annotations

import re
from pathlib import Path

from keras_ddl.errors import ConfigError

# Any other word may be a number of ranks that we would miss (`cpu=4`, `slot=4`), or a line of a rankfile.
_WORDS = r"(?:\s+(?:max[-_]slots|slots[-_]max|sockets|username|user)\s*=\s*\w+)*?"
_LINE = re.compile(
    r"(?P<names>[A-Za-z0-9](?:[A-Za-z0-9._-]|\[[0-9,-]+\])*)"
    rf"(?::(?P<after_colon>\d+)|{_WORDS}\s+slots\s*=\s*(?P<slots>\d+))?{_WORDS}"
)
# More hosts than any cluster has: a slip in a range must not fill the memory.
_MAX_HOSTS = 100_000


def read(path: str | Path, slots: int | None = None) -> str:
    """Returns the hosts of a file as for `--hosts`: "h0:2,h1:2", in the order in which they first come.

    Each line names a host, or several by ranges in brackets. A line without a number of ranks counts as `slots`, or as
    one rank for each time that the host comes, as Open MPI, `srun` and SLURM_HOSTFILE count. Empty lines and what
    follows a `#` are ignored, and so are Open MPI's other words (`max_slots=8`).

    Raises: ConfigError: a line that is none of these, a host with two numbers, or a file without hosts.
    """
    ranks: dict[str, int] = {}
    numbered: set[str] = set()
    for number, text in enumerate(Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise _refused(path, number, line, "host, host:ranks or host slots=ranks; hosts may be node[01-04]")
        given = found["after_colon"] or found["slots"]
        for name in _expanded(found["names"], path, number):
            if given is not None and int(given) < 1:
                raise _refused(path, number, line, "1 or more ranks")
            if name in numbered or (given is not None and name in ranks):
                raise _refused(path, number, line, f"one number of ranks for {name}, which has one already")
            if given is None and slots is None:
                ranks[name] = ranks.get(name, 0) + 1
            else:
                ranks[name] = int(given) if given is not None else slots or 1
                numbered.update([name] if given is not None else [])
            if len(ranks) > _MAX_HOSTS:
                raise _refused(path, number, line, f"at most {_MAX_HOSTS} hosts")
    if not ranks:
        raise ConfigError(f"A host file must name at least one host. Received: {str(path)!r}, which names none.")
    return ",".join(f"{name}:{count}" for name, count in ranks.items())


def _expanded(names: str, path: str | Path, number: int) -> list[str]:
    """Returns the hosts of "n[1-2,05]x": n1x, n2x, n05x. Numbers keep their leading zeros."""
    before, bracket, rest = names.partition("[")
    if not bracket:
        return [names]
    inside, _, after = rest.partition("]")
    tails = _expanded(after, path, number)
    hosts: list[str] = []
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdigit() or not last.isdigit() or int(last) < int(first):
            raise _refused(path, number, names, "ranges such as [01-04,7]")
        if len(hosts) + (int(last) - int(first) + 1) * len(tails) > _MAX_HOSTS:
            raise _refused(path, number, names, f"at most {_MAX_HOSTS} hosts")
        middle = [f"{before}{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
        hosts += [host + tail for host in middle for tail in tails]
    return hosts


def _refused(path: str | Path, number: int, line: str, rule: str) -> ConfigError:
    return ConfigError(f"A line of a host file must be: {rule}. Received: {line!r} in {path}, line {number}.")
