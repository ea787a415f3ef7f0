"""BroadcastVariables: every rank begins training with one rank's variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.comparison import require_equal
from keras_ddl.errors import NotInitializedError
from keras_ddl.state.callback_state import JobCallback
from keras_ddl.strategy.agreement.training_state import broadcast_training_state


class BroadcastVariables(JobCallback):
    """Broadcasts the model's and the optimizer's variables from `root` when training begins.

    Under keras_ddl.Strategy it is not needed: the Strategy itself broadcasts. It is for plain Keras with
    `keras_ddl.init()`, and for weights that only one rank has loaded. A model without variables yet (a subclassed one
    that has not been called) is broadcast right after its first batch.

    Random layers such as Dropout keep a different random stream on each rank, so that ranks drop different units.

    Args:
        root: the rank whose variables all ranks get.
        exclude: variables that stay local to each rank, with their optimizer slots.
    Raises: (at train begin, on every rank) NotInitializedError: `keras_ddl.init()` was not called.
        RankMismatchError: the ranks have different variables.
    Cost: one broadcast of all variables.
    """

    def __init__(self, root: int = 0, exclude: Iterable[Any] = ()) -> None:
        super().__init__()
        self.root = root
        self.exclude = list(exclude)
        self._done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not communicator.is_initialized():
            raise NotInitializedError(
                "BroadcastVariables can only be used after keras_ddl.init(). Received: a call of fit before it. Call "
                "keras_ddl.init() at the top of the script, or build the model under keras_ddl.Strategy().scope()."
            )
        # Ranks with and without a built model would call different collectives.
        require_equal(
            "built" if self.model.built else "not built",
            "BroadcastVariables/built",
            "Either all ranks or no rank must have built the model.",
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
