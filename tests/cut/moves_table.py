"""What the small programs of the tests move between ranks: a table, and the program that writes it.

    PYTHONPATH=tests python tests/cut/moves_table.py   # writes moves_table.txt; read what git shows as changed

A line is a program: its collectives and what they are for, and after "|" the types of operations that are replicated
for lack of a rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf

tf.config.threading.set_inter_op_parallelism_threads(32)  # as conftest.py

from cut import test_control_flow, test_operations  # noqa: E402
from cut.counting import report_of  # noqa: E402

FILE = Path(__file__).with_suffix(".txt")
_X = np.random.default_rng(0).normal(size=(6, 4, 3))
Program = tuple[Callable[[Any], Any], np.ndarray]
PROGRAMS: dict[str, Program] = {
    **{
        f"{each.__name__} of {test_operations.types_of(each)[0]}": (each, _X[:, 0]) for each in test_operations.PROGRAMS
    },
    **{name: (each, _X) for name, each in test_control_flow.STEPS.items()},
}


def line(name: str) -> str:
    """Returns what a program moves whose number of rows is open when it is traced."""
    step, batch = PROGRAMS[name]
    report = report_of(lambda given: tf.nest.flatten(step(given[0])), (batch,), static=False)
    moved = Counter(f"{each.kind} {each.reason}" for each in report.entries for _ in range(each.count))
    words = [f"{count} {each}" for each, count in sorted(moved.items())]
    replicated = [f"{count} {each}" for each, count in sorted(report.replicated.items())]
    return f"{name}: {', '.join(words)} | {', '.join(replicated)}"


def main() -> None:
    FILE.write_text("".join(f"{line(each)}\n" for each in PROGRAMS))


if __name__ == "__main__":
    main()
