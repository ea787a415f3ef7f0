"""Reads a timeline and finds its straggler."""

import pytest

from harness.made_timelines import Job
from keras_ddl.timeline import steps
from keras_ddl.timeline.summary import summarize
from keras_ddl.timeline.words import sentences


def test_summary_names_the_late_rank_and_its_slow_input(tmp_path):
    found = summarize(steps.read(Job().write(tmp_path / "job.json")))
    (straggler,) = found.stragglers
    assert straggler.rank == 3 and straggler.last == 1.0
    assert straggler.late == pytest.approx(12e-3, abs=3e-6) and straggler.causes == {
        "input": pytest.approx(12e-3, abs=3e-6)
    }
    assert "Rank 3 (h) was last in 100% of the steps, by 12 ms in the median; its input took 12 ms more." in sentences(
        found
    )
