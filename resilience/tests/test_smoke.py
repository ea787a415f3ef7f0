"""One of three ranks is lost at any moment: the others finish like one process or report why they cannot."""

from __future__ import annotations

from simulated_job import simulated
from simulated_mesh import simulated_mesh
from simulated_newcomers import simulated_newcomers
from test_survival_model import Case, explore


def test_every_schedule_with_at_least_two_of_three_ranks() -> None:
    with simulated(), simulated_newcomers(), simulated_mesh():
        schedules, states = explore(Case(calls=1, collectives=1, least=2))
    assert schedules > 100 < states
