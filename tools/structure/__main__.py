"""Checks all rules and prints violations; exits with 1 if there are any."""

from __future__ import annotations

import sys

from . import layers, native_layers, pages, private_reads, tests
from .sources import ROOT, Project, Rule

RULES: tuple[Rule, ...] = tuple(
    rule for module in (layers, private_reads, native_layers, pages, tests) for rule in module.RULES
)


def main() -> int:
    project = Project(ROOT)
    findings = sorted({finding for rule in RULES for finding in rule(project)})
    for path, line, text in findings:
        print(f"{path.relative_to(ROOT)}:{line}: {text}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
