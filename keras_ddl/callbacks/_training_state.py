"""The state that all ranks of a training must share: the model's and the optimizer's variables."""

from __future__ import annotations

from typing import Any

from keras_ddl import communicator
from keras_ddl.checkpoint import model_state
from keras_ddl.compat import keras as keras_compat
from keras_ddl.strategy import agreement
from keras_ddl.strategy.extended import seed_offset


def build_optimizer(model: Any) -> None:
    """Creates the optimizer's variables, which Keras would create in the first step."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def broadcast_training_state(model: Any, root: int = 0) -> None:
    """Gives all ranks root's variables. COLLECTIVE.

    Without a Strategy each rank's random layers then draw from a stream of their own; under one the ranks share a seed,
    of whose numbers each takes those of its rows.

    Raises: RankMismatchError: the ranks have different variables.
    """
    if not communicator.is_initialized() or communicator.size() == 1:
        return
    build_optimizer(model)
    variables = agreement.all_variables(model)
    agreement.broadcast_variables(variables, root=root)
    stream = (communicator.rank() - root) % communicator.size()
    if stream and keras_compat.strategy_of(model) is None:
        for variable in filter(model_state.is_seed, variables):
            seed, *rest = variable.numpy().tolist()
            variable.assign([(seed + seed_offset(stream)) % 2**31, *rest])
