"""Reads host files of Open MPI and Horovod (`n1 slots=4`), MPICH (`n1:4`), and Slurm (`n[01-03]`, a line per task)."""

from __future__ import annotations

import re
from pathlib import Path

from keras_ddl.errors import ConfigError

# Other words are refused, because they may mean a number of ranks (`cpu=4`, `slot=4`), or belong to a rankfile.
_WORDS = r"(?:\s+(?:max[-_]slots|slots[-_]max|sockets|username|user)\s*=\s*\w+)*?"
_LINE = re.compile(
    r"(?P<names>[A-Za-z0-9](?:[A-Za-z0-9._-]|\[[0-9,-]+\])*)"
    rf"(?::(?P<after_colon>\d+)|{_WORDS}\s+slots\s*=\s*(?P<slots>\d+))?{_WORDS}"
)
# No cluster has more hosts; a mistyped range must not exhaust memory.
_MAX_HOSTS = 100_000


def read(path: str | Path, slots: int | None = None) -> str:
    """Returns a file's hosts in the form of `--hosts`, "h0:2,h1:2", in the order of their first lines.

    Each line names a host, or several by ranges in brackets. A line without a number of ranks counts as `slots` ranks;
    without `slots`, as one rank, and lines of a host add up (as in Open MPI, `srun` and SLURM_HOSTFILE). Empty lines,
    comments after `#`, and Open MPI's other words (`max_slots=8`) are ignored.

    Raises: ConfigError: an invalid line, a host with two numbers, or a file without hosts.
    """
    ranks: dict[str, int] = {}
    numbered: set[str] = set()
    for number, text in enumerate(Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise _refused(
                path,
                number,
                line,
                "Write host, host:ranks or host slots=ranks; host may be node[01-04]",
            )
        count = match["after_colon"] or match["slots"]
        for name in _expanded(match["names"], path, number):
            if count is not None and int(count) < 1:
                raise _refused(path, number, line, "A host must have 1 or more ranks")
            if name in numbered or (count is not None and name in ranks):
                raise _refused(path, number, line, f"A host must have one number of ranks, but {name} has two")
            if count is None and slots is None:
                ranks[name] = ranks.get(name, 0) + 1
            else:
                ranks[name] = int(count) if count is not None else slots or 1
                numbered.update([name] if count is not None else [])
            if len(ranks) > _MAX_HOSTS:
                raise _refused(path, number, line, f"There must be at most {_MAX_HOSTS} hosts")
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
            raise _refused(path, number, names, "Brackets must have ranges such as [01-04,7]")
        if len(hosts) + (int(last) - int(first) + 1) * len(tails) > _MAX_HOSTS:
            raise _refused(path, number, names, f"There must be at most {_MAX_HOSTS} hosts")
        middle = [f"{before}{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
        hosts += [host + tail for host in middle for tail in tails]
    return hosts


def _refused(path: str | Path, number: int, line: str, rule: str) -> ConfigError:
    return ConfigError(f"Host file: {rule}. Received: {line!r} in {path}, line {number}.")
