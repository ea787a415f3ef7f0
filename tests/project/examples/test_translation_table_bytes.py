"""The study of the shared table's gradient: its figures against the paper's, and against measurements on ranks."""

import json
import sys

import pytest
from examples.translation_parts import table_bytes

from harness.examples import EXAMPLES, run
from harness.launching import python_path


def test_published_figures_follow_from_published_sizes():
    computed = table_bytes.computed(**table_bytes.PAPER)
    published = table_bytes.row("published", **table_bytes.PAPER, **table_bytes.PUBLISHED)
    assert 82 < published["times less"] < 83
    for column in ("gathered, MB", "one table, MB", "times less"):
        assert computed[column] == pytest.approx(published[column], rel=0.01)  # lookups are at most 2 x 5,000


@pytest.mark.long
@pytest.mark.parallel
def test_ranks_hold_the_computed_bytes(tmp_path):
    command = (sys.executable, "-m", "translation.studies.table_bytes", "--ranks", 1, 2, "--rows", 700, "--width", 16)
    options = ("--tokens", 300, "--steps", 2, "--json", "rows.json", "--plot", "picture.png")
    output = run(tmp_path, *command, *options, env={"PYTHONPATH": python_path(EXAMPLES)})
    assert "picture: picture.png" in output and (tmp_path / "picture.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "rows.json").read_text())
    measured = [each for each in found if each["how"] == "measured"]
    assert [each["ranks"] for each in measured] == [1, 2] and found[-1]["how"] == "published"
    for each in measured:
        assert 200 < each["lookups a rank"] <= 300
        assert each == table_bytes.computed(each["ranks"], 700, 16, each["lookups a rank"]) | {"how": "measured"}
