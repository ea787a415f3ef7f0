"""Judges two recordings: equal up to rounding, and different from some step on."""

from made_recordings import EPSILON, Made, training

from keras_ddl.verify import compare


def test_judge_equal_up_to_rounding() -> None:
    ranks, drift = Made(training(change=3e-15)), Made(training(change=1e-15))
    found = compare.judge(Made(training()), ranks, drift, EPSILON)
    assert (found.verdict, found.steps, found.first_beyond) == ("equal", 4, None)
    assert found.nearest.nearest == "w1"
    assert 0 < found.nearest.drift < found.nearest.far < found.nearest.allowed


def test_judge_names_the_first_step_and_the_variable_that_differs() -> None:
    ranks = Made(training(change=1e-6, at=2, name="w2"))
    found = compare.judge(Made(training()), ranks, Made(training(change=1e-15)), EPSILON)
    assert found.verdict == "different"
    assert found.first_beyond.event.step == 3
    assert [name for name, _ in found.first_beyond.beyond] == ["w2"]
    assert len(found.rows) == 3  # the first difference is the last compared event
