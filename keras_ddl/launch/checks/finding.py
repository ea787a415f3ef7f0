"""The result of one check: its severity, what was found, and the remedy."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


class Severity(enum.IntEnum):
    """`keras-ddl doctor` exits with 0 if the worst finding is a NOTE, with 3 for a WARNING, and with 1 for an ERROR."""

    OK = 0
    NOTE = 1  # good to know
    WARNING = 2  # slower, or fails in some cases
    ERROR = 3  # training fails


EXIT_STATUS = {Severity.OK: 0, Severity.NOTE: 0, Severity.WARNING: 3, Severity.ERROR: 1}


@dataclass(frozen=True)
class Finding:
    """`subject`: what was checked. `found`: the result. `remedy`: empty if none is needed."""

    severity: Severity
    subject: str
    found: str
    remedy: str = ""
    host: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.name.lower()}


def merged(findings: Iterable[Finding], num_hosts: int) -> list[Finding]:
    """Returns each finding once, worst first, with the hosts that share it (none if all do)."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        same = Finding(finding.severity, finding.subject, finding.found, finding.remedy)
        hosts.setdefault(same, [])
        if finding.host and finding.host not in hosts[same]:
            hosts[same].append(finding.host)
    result = []
    for same, names in hosts.items():
        where = "" if len(names) >= num_hosts else ", ".join(names)
        result.append(Finding(same.severity, same.subject, same.found, same.remedy, where))
    return sorted(result, key=lambda finding: -finding.severity)


def worst(findings: Sequence[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)
