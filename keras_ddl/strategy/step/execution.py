"""An execution of Keras's: one call of a model's train_function, test_function or predict_function.

It runs one step, or several (`steps_per_execution`), each through `Strategy.run`. In one process Keras makes one
function for all batches, and TensorFlow traces it for each kind of them. Here a model has an `Execution` for each kind
of global batch (batch_kinds.py) and each way in which this rank has its rows of it, with a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_ddl.data import order
from keras_ddl.data.rows import UNKNOWN, BatchRows
from keras_ddl.strategy.step import garbage
from keras_ddl.strategy.step.batch_kinds import BatchKind
from keras_ddl.strategy.trainer_calls import TrainerCall


@dataclass(eq=False)
class Execution(TrainerCall):
    """What `Strategy.run` has to know of the execution in which Keras calls it.

    Attributes:
        model, step: whose step it runs, and which: "train_step" | "test_step" | "predict_step", whatever the program
            calls its function.
        rows: what is known of the rows of its batches. kind: of the batches, None where it is not known.
        accumulates_parts: each rank accumulates its part of the gradients (accumulation.py).
        is_local: the rows are those that the caller has passed, and the step is this rank's alone (predict_on_batch).
        is_single: Keras passes a batch and no iterator, and traces another function for it, whose kernels have their
            own state, in one process as well.
        steps_traced: since the function was called: each of several steps has a trace of its own.
    """

    step: str
    rows: BatchRows = UNKNOWN
    kind: BatchKind | None = None
    accumulates_parts: bool = False
    is_local: bool = False
    is_single: bool = False
    steps_traced: int = 0
    _function: Callable[[Any], Any] | None = field(default=None, init=False)

    def run(self, data: Any, make_function: Callable[[Execution, Any], Callable[[Any], Any]]) -> Any:
        """Executes the steps on `data`, which is this rank's. `make_function`: makes what does so, from the first data.

        In it only Keras calls `Strategy.run`: the program's code runs as in one process (tracing.py).
        """
        with self.entered(), order.translate_errors():
            self.steps_traced = 0
            if self._function is not None:
                return self._function(data)
            with garbage.paused():
                self._function = make_function(self, data)
                self.steps_traced = 0
                return self._function(data)

    def specs_of_step(self, tensors: int) -> Sequence[Any] | None:
        """Returns the types of the `tensors` tensors of the step that is traced now, as its kind has them, if known."""
        if self.kind is None or tensors == 0 or len(self.kind.specs) % tensors:
            return None
        specs = self.kind.specs[self.steps_traced * tensors :][:tensors]
        return specs if len(specs) == tensors else None
