"""An execution in Keras's sense: a call of a model's train_function, test_function or predict_function.

It runs one step or several (`steps_per_execution`), each through `Strategy.run`. In one process Keras makes one
function for all batches, and TensorFlow traces it for each kind of batch. Here a model has an `Execution`, with its own
function, for each kind of global batch (batch_kinds.py) and each way in which this rank has its rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_ddl.compat import models
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import order
from keras_ddl.data.rows import UNKNOWN, BatchRows
from keras_ddl.strategy.calls.trainer_calls import TrainerCall
from keras_ddl.strategy.step import garbage
from keras_ddl.strategy.step.batch_kinds import BatchKind
from keras_ddl.strategy.step.cut_step import variables_of


@dataclass(eq=False)
class Execution(TrainerCall):
    """The facts about an execution that `Strategy.run` must know when Keras calls it.

    Attributes:
        model: the model.
        step: which of the model's steps runs: "train_step", "test_step" or "predict_step", even if the program's
            function has another name.
        rows: what is known about the rows of the batches.
        kind: the kind of the batches; None: unknown.
        accumulates_parts: whether each rank accumulates its part of the gradients (accumulation.py).
        is_local: whether the step runs on this rank alone, on the rows that the caller has passed (predict_on_batch).
        is_single: whether Keras passes a batch instead of an iterator. Even in one process it traces another function
            for this, whose kernels have their own state.
        traces: the traces of the steps in the graph of the function that was traced last.
        steps_traced: how many steps have been traced in the graph that is being traced. If an execution runs several
            steps, each has its own trace.
    """

    step: str
    rows: BatchRows = UNKNOWN
    kind: BatchKind | None = None
    accumulates_parts: bool = False
    is_local: bool = False
    is_single: bool = False
    traces: list[tf.types.experimental.ConcreteFunction] = field(default_factory=list, init=False)
    steps_traced: int = field(default=0, init=False)
    _function: Callable[[Any], Any] | None = field(default=None, init=False)
    _graph: weakref.ref[Any] | None = field(default=None, init=False)  # graph of the function that was traced last

    def run(self, data: Any, make_function: Callable[[Execution, Any], Callable[[Any], Any]]) -> Any:
        """Executes the steps on this rank's `data`.

        make_function: makes the function that executes them, given the first data. In that function only Keras calls
            `Strategy.run`; the program's code runs as in one process (tracing.py).
        """
        with self.entered(), order.translate_errors():
            if self._function is not None:
                return self._function(data)
            with garbage.paused():
                self._function = make_function(self, data)
                return self._function(data)

    def begin_step(self) -> None:
        """Called when a step is traced. If TensorFlow traces a function again, counting restarts at its first step."""
        graph = tf_compat.outermost_graph()
        if self._graph is None or self._graph() is not graph:
            self._graph, self.traces, self.steps_traced = weakref.ref(graph), [], 0

    def written(self) -> list[Any]:
        """Returns all variables that the steps may write, in the same order on all ranks.

        For traced steps these are all variables that the traces use. For eager steps, which each rank undoes and redoes
        separately (eager_copies.py), they are the model's variables.
        """
        if not self.traces:
            return models.written_by_steps(self.model)
        return list({id(each): each for concrete in self.traces for each in variables_of(concrete)}.values())

    def specs_of_steps(self, tensors: int) -> list[Sequence[Any]]:
        """Returns the types of the `tensors` tensors of the step being traced, and of the execution's later steps.

        The types are those of its kind; [] if they are unknown.
        """
        if self.kind is None or tensors == 0 or len(self.kind.specs) % tensors:
            return []
        step_offsets = range(self.steps_traced * tensors, len(self.kind.specs), tensors)
        return [self.kind.specs[first : first + tensors] for first in step_offsets]
