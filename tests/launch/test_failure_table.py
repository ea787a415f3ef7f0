"""failures.md: the table has a row for every case, and (long) each case ends as its row says."""

import pytest

from launch import failure_table
from launch.failure_table import CASES, MPIRUN, RUN


def test_failure_table_has_every_case():
    rows = failure_table.rows_of_page()
    assert list(rows) == [case.what for case in CASES.values()], "run python tests/launch/failure_table.py CASE"
    for case in CASES.values():
        cells = rows[case.what].strip().strip("|").split(" | ")
        assert f", {case.status if case.status >= 0 else 128 - case.status}" in cells[1], rows[case.what]
        assert bool(cells[3].strip()) == (case.mpirun_words is not None), rows[case.what]


@pytest.mark.long
@pytest.mark.quiet
@pytest.mark.parametrize(
    ("case", "launcher"),
    [(case, each) for case, told in CASES.items() for each in (RUN, MPIRUN) if each == RUN or told.mpirun_words],
)
def test_failure_ends_as_the_table_says(case, launcher, tmp_path):
    if not failure_table.can_try(case):
        pytest.skip("needs root, or a control group of memory")
    failure_table.see(case, launcher, tmp_path)
