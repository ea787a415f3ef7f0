"""One of three ranks is lost, at every moment: the others end the training as one process does, or say why not."""

from __future__ import annotations

from simulated_job import simulated
from simulated_mesh import simulated_mesh
from simulated_newcomers import simulated_newcomers
from test_survival_model import Case, explore


def test_every_schedule_in_which_two_of_three_must_be_left() -> None:
    with simulated(), simulated_newcomers(), simulated_mesh():
        schedules, states = explore(Case(calls=1, collectives=1, least=2))
    assert schedules > 100 < states
