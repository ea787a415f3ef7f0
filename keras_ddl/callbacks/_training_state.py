"""The state that all ranks of a training must share: the model's and the optimizer's variables."""

from __future__ import annotations

from typing import Any

from keras_ddl import communicator
from keras_ddl.strategy import agreement


def build_optimizer(model: Any) -> None:
    """Creates the optimizer's variables, which Keras would create in the first step."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def broadcast_training_state(model: Any, root: int = 0) -> None:
    """Gives all ranks root's variables; each rank's random layers draw from a stream of their own. COLLECTIVE.

    Raises: RankMismatchError: the ranks have different variables.
    """
    if not communicator.is_initialized() or communicator.size() == 1:
        return
    build_optimizer(model)
    agreement.broadcast_variables(agreement.all_variables(model), communicator.rank(), root=root)
