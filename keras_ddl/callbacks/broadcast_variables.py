"""BroadcastVariables: every rank begins training with one rank's variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from keras_ddl import communicator
from keras_ddl.communicator.comparison import require_equal
from keras_ddl.errors import NotInitializedError
from keras_ddl.resuming.training_state import broadcast_training_state


class BroadcastVariables(keras.callbacks.Callback):
    """Broadcasts the model's and the optimizer's variables from `root` when training begins.

    A model made under keras_ddl.Strategy does not need it: the Strategy broadcasts by itself. It is for plain Keras
    with `keras_ddl.init()`, and for weights that one rank alone has loaded. A model without variables yet (a
    subclassed one that has not been called) is broadcast right after its first batch instead.

    Dropout and other random layers continue on a random stream of each rank's own, or all would drop the same units.

    Args:
        root: the rank whose variables all ranks get.
        exclude: variables that stay each rank's own, as does what optimizers keep for them.
    Raises: (at train begin, on every rank) NotInitializedError: `keras_ddl.init()` was not called.
        RankMismatchError: the ranks have different variables.
    Cost: one broadcast of all variables.
    """

    never_stops_within_epoch = True  # spares the ranks an agreement in every batch

    def __init__(self, root: int = 0, exclude: Iterable[Any] = ()) -> None:
        super().__init__()
        self.root = root
        self.exclude = list(exclude)
        self._done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not communicator.is_initialized():
            raise NotInitializedError(
                "BroadcastVariables needs the other ranks. Received: fit before keras_ddl.init(). Call "
                "keras_ddl.init() at the top of the script, or build the model under keras_ddl.Strategy().scope()."
            )
        # A rank that has built its model and one that has not would meet in different collectives.
        require_equal(
            "built" if self.model.built else "not built",
            "BroadcastVariables/built",
            "All ranks must have built their model, or none.",
            "Build it (or call it on a batch) on every rank.",
        )
        self._done = False
        if self.model.built:
            self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._done and self.model.built:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._done:  # an epoch of one batch
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        broadcast_training_state(self.model, self.root, self.exclude)
