"""DivergenceGuard's verdicts on typical curves of window losses."""

import math

import numpy as np
import pytest

from keras_ddl.callbacks.divergence_guard import LossJudge


def found(losses, rise=2.0, ceiling=None, grace=10):
    """Returns the first window with a problem, and the problem."""
    judge = LossJudge(rise, ceiling, grace)
    problems = [judge.problem(float(loss)) for loss in losses]
    return next(((window, each) for window, each in enumerate(problems) if each is not None), None)


def learning(start, end, windows=40, noise=0.0):
    curve = end + (start - end) * np.exp(-np.arange(windows) / 8)
    return curve + noise * np.random.default_rng(0).normal(size=windows)


BLIND = 4.8  # the cross-entropy of a model that ignores its input


@pytest.mark.parametrize(
    "curve",
    [
        learning(6.0, 0.5, noise=0.1),
        learning(6.0, 4.0, noise=0.2),
        learning(0.011, 0.01, noise=0.001),
        learning(6.0, 1e-4, windows=200, noise=1e-5),  # converged: a multiple of almost zero is no problem
        np.append(learning(6.0, 2.0), 3.5),  # a spike, mostly hidden by the mean of its window
        learning(-1.0, -10.0, noise=0.5),
        np.full(40, 1e-3) + np.random.default_rng(1).uniform(0, 1e-3, 40),  # nothing to learn
    ],
)
def test_falling_or_noisy_loss_is_no_problem(curve):
    assert found(curve) is None
    assert found(curve, rise=None) is None
    assert found(curve, ceiling=curve[0] * 0.999 if curve[0] > 0 else curve[0] + 1, grace=41) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_loss_is_a_problem_at_once(bad):
    assert found([bad]) == (0, "no earlier window was good")
    assert found([6.0, 4.0, bad], rise=None) == (2, "the lowest earlier loss was 4")


def test_growing_loss_is_a_problem_beyond_rise():
    assert found([1.0, 2.9, 3.1]) == (2, "the lowest earlier loss was 1")
    assert found([1.0, 1.4, 1.6], rise=0.5) == (2, "the lowest earlier loss was 1")
    assert found([1.0, 1e9], rise=None) is None
    slowly = np.append(learning(6.0, 4.0), np.linspace(4.0, 12.5, 60))
    assert slowly[found(slowly)[0]] > 12 and slowly[found(slowly, rise=0.25)[0]] < 5.2


def test_jump_to_blind_guesses_is_a_problem_from_low_losses_or_above_a_ceiling():
    jump = [*learning(6.0, 2.0), *[BLIND] * 20]
    assert found(jump) is None, "less than three times the lowest"
    assert found(jump, rise=1.0) == (40, f"the lowest earlier loss was {min(jump):g}")
    assert found(jump, ceiling=4.7) == (40, "it must be below 4.7 by then")
    assert found(jump, ceiling=4.7, rise=None) == (40, "it must be below 4.7 by then")
    later = [*learning(6.0, 1.5), *[BLIND] * 20]
    assert found(later) == (40, f"the lowest earlier loss was {min(later):g}")


def test_loss_stuck_at_blind_guesses_is_a_problem_after_the_grace():
    stuck = [6.0, 5.1, *[BLIND] * 30]
    assert found(stuck) is None and found(stuck, rise=0.1) is None
    assert found(stuck, ceiling=4.7, grace=6) == (5, "it must be below 4.7 by then")
    assert found(stuck, ceiling=4.7, grace=1) == (0, "it must be below 4.7 by then")
    assert found(stuck, ceiling=4.9, grace=6) is None


def test_state_above_the_ceiling_is_not_good():
    judge = LossJudge(2.0, 4.7, 4)
    good = []
    for loss in (6.0, 5.0, 4.6, 4.0, 4.8, 3.9):
        judge.problem(loss)
        good.append(judge.is_good)
    assert good == [False, False, True, True, False, True]


def test_losses_after_going_back_are_compared_with_the_restored_state():
    judge = LossJudge(2.0, 4.7, 3)
    for loss in (6.0, 5.9, 1.0):
        assert judge.problem(loss) is None
    assert judge.problem(4.6) == "the lowest earlier loss was 1"
    judge.go_back()  # restores the state before the last good window, here the first one with its full grace
    assert [judge.problem(loss) for loss in (6.0, 4.8, 4.8)] == [None, None, "it must be below 4.7 by then"]
    judge = LossJudge(2.0, None, 3)
    for loss in (6.0, 4.5, 1.0):
        assert judge.problem(loss) is None
    assert judge.problem(4.4) == "the lowest earlier loss was 1"
    judge.go_back()  # restores the state with loss 4.5; a lower rate needs time to reach 1 again
    assert judge.problem(4.4) is None and judge.problem(2.0) is None
    assert judge.problem(6.1) == "the lowest earlier loss was 2"
    judge.go_back()
    assert judge.problem(4.4) is None
