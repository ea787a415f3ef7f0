"""The interface of a Strategy for its own parts, which cannot import the class because `Strategy` imports them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from keras_ddl.compat import keras as keras_compat

if TYPE_CHECKING:
    from keras_ddl.strategy.agreement.random_state import RandomState
    from keras_ddl.strategy.job import Job
    from keras_ddl.strategy.keras_patches.save_records import SaveRecords
    from keras_ddl.strategy.mesh.layout import Layout
    from keras_ddl.strategy.resilience import Resilience
    from keras_ddl.strategy.step.keras_step import KerasSteps
    from keras_ddl.topology import Topology


class StrategyInterface(Protocol):
    """A `keras_ddl.Strategy`, as its own parts see it."""

    rank: int
    size: int
    topology: Topology
    job: Job
    mesh_layout: Layout | None  # over the mesh of now, in a job that goes on with a layout
    random_state: RandomState
    saves: SaveRecords  # of several ranks
    keras_steps: KerasSteps
    resilience: Resilience

    @property
    def is_several(self) -> bool: ...
    def renew(self, topology: Topology) -> None: ...
    def scope(self) -> AbstractContextManager[Any]: ...
    def function(self, step: Any, *, batches: str, reduce_retracing: bool) -> Any: ...
    def experimental_distribute_dataset(self, dataset: Any) -> Any: ...


def strategy_of(owner: Any) -> StrategyInterface | None:
    """Returns the Strategy that a model or an optimizer was made under, or None."""
    return keras_compat.strategy_of(owner)


def strategy_of_ranks(owner: Any) -> StrategyInterface | None:
    """Like `strategy_of`, but None if the Strategy has one rank and takes no newcomers, so that it has nothing to
    do."""
    strategy = strategy_of(owner)
    return strategy if strategy is not None and strategy.is_several else None
