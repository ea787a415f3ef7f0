"""The base class of Strategy, which the other modules use."""

from __future__ import annotations

from typing import Any

from keras_ddl.communicator.newcomers import history
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.agreement.random_state import RandomState
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.mesh.layout import VariableLayout
from keras_ddl.strategy.resilience import Resilience
from keras_ddl.strategy.saving.save_records import SaveRecords
from keras_ddl.strategy.step.keras_step import KerasSteps
from keras_ddl.topology import Topology


class BaseStrategy(tf.distribute.Strategy):
    """The internal half of Strategy, without the methods that users call.

    Attributes:
        mesh_layout: the layout over the current mesh, in a job that can lose ranks.
        saves: the job's SaveRecords.
    """

    rank: int
    size: int
    topology: Topology
    job: Job
    mesh_layout: VariableLayout | None
    random_state: RandomState
    saves: SaveRecords
    keras_steps: KerasSteps
    resilience: Resilience

    @property
    def is_several(self) -> bool:
        """Whether there are several ranks, or one rank that takes newcomers and therefore acts like several."""
        return self.size > 1 or history.takes_newcomers()

    def renew(self, topology: Topology) -> None:
        """Continues with the ranks of `topology` (resilience.py), which then call `communicator.prepare_plans`."""
        self.rank, self.size, self.topology = topology.rank, topology.size, topology
        self.job.renew(topology)
        self.random_state.size, self.saves.rank = topology.size, topology.rank


def strategy_of(owner: Any) -> BaseStrategy | None:
    """Returns the Strategy that a model or an optimizer was made under, or None."""
    return keras_compat.strategy_of(owner)


def strategy_of_ranks(owner: Any) -> BaseStrategy | None:
    """Like `strategy_of`, but None if the Strategy has nothing to do: it has one rank and takes no newcomers."""
    strategy = strategy_of(owner)
    return strategy if strategy is not None and strategy.is_several else None
