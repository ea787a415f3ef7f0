"""BroadcastVariables: every rank begins training with one rank's variables."""

from __future__ import annotations

from typing import Any

import keras

from keras_ddl import communicator, ops
from keras_ddl.callbacks._variables import training_variables
from keras_ddl.errors import NotInitializedError, RankMismatchError


class BroadcastVariables(keras.callbacks.Callback):
    """Broadcasts the model's and the optimizer's variables from `root` when training begins.

    A model made under keras_ddl.Strategy does not need it: the Strategy broadcasts by itself. It is for plain Keras
    with `keras_ddl.init()`, and for weights that one rank alone has loaded. A model without variables yet (a
    subclassed one that has not been called) is broadcast right after its first batch instead.

    Seeds of dropout and other random layers stay each rank's own, or all ranks would drop the same units.

    Args:
        root: the rank whose variables all ranks get.
    Raises: (at train begin, on every rank) NotInitializedError: `keras_ddl.init()` was not called.
        RankMismatchError: the ranks have different variables.
    Cost: one broadcast of all variables.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root
        self._done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not communicator.is_initialized():
            raise NotInitializedError(
                "BroadcastVariables needs the other ranks. Received: fit before keras_ddl.init(). "
                "Call keras_ddl.init() at the top of the script, or build the model under keras_ddl.Strategy().scope()."
            )
        # A rank that has built its model and one that has not would meet in different collectives.
        built = communicator.all_gather_object(bool(self.model.built), name="BroadcastVariables/built")
        self._done = False
        if all(built):
            self._broadcast()
        elif any(built):
            raise RankMismatchError(
                "All ranks must have built their model, or none. Received: built="
                f"{dict(enumerate(built))} by rank. Build it (or call it on a batch) on every rank."
            )

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._done and self.model.built:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._done:  # an epoch of one batch
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        variables = training_variables(self.model)
        listed = [(getattr(v, "path", v.name), tuple(v.shape), str(v.dtype)) for v in variables]
        for rank, other in enumerate(communicator.all_gather_object(listed, name="BroadcastVariables/list")):
            if other != listed:
                difference = next(
                    (pair for pair in zip(listed, other) if pair[0] != pair[1]), (len(listed), len(other))
                )
                raise RankMismatchError(
                    "BroadcastVariables: all ranks must have the same variables in the same order. Received: "
                    f"{difference[0]} on rank {communicator.rank()}, {difference[1]} on rank {rank}. "
                    "Build the same model and the same optimizer on every rank."
                )
        ops.broadcast_variables(variables, root=self.root)
