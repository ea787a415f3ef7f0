"""Records which tests reach which lines of the cut and their times, and chooses the tests for a mutant (mutants.py)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mutations import Mutant

_SECONDS = 90.0  # of CPU time for one mutant's tests, as measured without mutants


class Tests(NamedTuple):
    """The tests for a mutant: the first ones, further ones, and whether its line runs only on import."""

    first: list[str]
    others: list[str]
    on_import: bool


class Reach:
    """Knows which tests reach which lines, their times, and which have noticed mutants."""

    def __init__(self, records: Sequence[Path]) -> None:
        import coverage

        self._seconds: dict[str, float] = {}
        self._tried, self._noticed = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self._lines: dict[str, dict[int, list[str]]] = {}
        for record in records:
            self._seconds |= json.loads(record.with_suffix(".json").read_text())
            data = coverage.CoverageData(str(record))
            data.read()
            for path in data.measured_files():
                lines = self._lines.setdefault(path.partition("/keras_ddl/cut/")[2], {})
                for line, tests in data.contexts_by_lineno(path).items():
                    lines.setdefault(line, []).extend(tests)

    def tests(self, mutant: Mutant, seconds: float) -> Tests:
        """Returns the tests for a mutant. The first ones take `seconds`, all of them _SECONDS."""
        lines = self._lines.get(mutant.file, {})
        first, last = mutant.lines
        reached = {test for line in range(first, last + 1) for test in lines.get(line, []) if test}
        on_import = not reached
        if on_import:  # all tests that reach any line of the file
            reached = {test for each in lines.values() for test in each if test}
        words = [word for word in mutant.name.replace("'", '"').split('"')[1::2] if word.isalpha()]

        def promise(test: str) -> float:
            """Returns how often a test notices mutants of the file, divided by its time."""
            key = (mutant.file, test)
            often = (self._noticed[key] + 0.2) / (self._tried[key] + 1)
            return often * (10 if any(word in test for word in words) else 1) / (self._seconds[test] + 0.1)

        chosen, total = Tests([], [], on_import), 0.0
        for test in sorted(reached & self._seconds.keys(), key=promise, reverse=True):
            total += self._seconds[test]
            if chosen.first and total > _SECONDS:
                break
            (chosen.others if chosen.first and total > seconds else chosen.first).append(test)
        return chosen

    def limit(self, tests: Sequence[str]) -> float:
        """Returns the seconds of CPU time after which a mutant counts as endless."""
        return 30 + 5 * sum(self._seconds[each] for each in tests)

    def learn(self, mutant: Mutant, tests: Sequence[str], by: str) -> None:
        """Records the test that noticed a mutant, and those that did not."""
        for each in tests[: tests.index(by) + 1] if by in tests else tests:
            self._tried[mutant.file, each] += 1
        self._noticed[mutant.file, by] += 1
