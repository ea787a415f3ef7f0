"""The step of one process, cut into ranks: docs/cut.md.

graph = tf.function(step).get_concrete_function(...).graph     # traced on the whole batch
outputs = build_step(graph, local_inputs, ...)                 # in the rank's own tf.function
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import list_rules, rules, shape_rules  # noqa: F401  (they register)
from keras_ddl.cut.builder import Batch, Builder
from keras_ddl.cut.collectives import Collectives, OfRanks
from keras_ddl.cut.dims import Dim
from keras_ddl.cut.program import Program
from keras_ddl.cut.report import Report
from keras_ddl.cut.states import WHOLE, Rows, State

__all__ = ["WHOLE", "Batch", "Collectives", "OfRanks", "Report", "Rows", "State", "build_step"]


def build_step(
    graph: Any,
    inputs: Sequence[tf.Tensor],
    states: Sequence[State],
    batch: Batch,
    collectives: Collectives,
    *,
    report: Report | None = None,
    captured: Callable[[Any], Any] = lambda outer: outer,
) -> list[tf.Tensor]:
    """Makes, in the graph that is being traced, what one rank has to do of a step.

    Args:
        graph: of the step traced on the whole batch.
        inputs: what this rank has of each of the step's arguments; `states`: how that relates to the whole argument.
        batch: the rows of all ranks and of this one.
        collectives: what sums and gathers.
        report: is told what was made.
        captured: given an outer tensor that the step uses (a variable's handle), returns what this rank uses.
    Returns: the step's outputs in order, whole, equal on all ranks.
    """
    program = Program(graph)
    builder = Builder(program, batch, collectives, report or Report())
    for value, outer in program.captured:
        builder.give(value, captured(outer), WHOLE)
    for value, tensor, state in zip(program.inputs, inputs, states):
        builder.give(value, tensor, state, _input_dims(builder, value, state))
    builder.build()
    for node in program.effects:
        # In the graph of a tf.function they run by themselves, being stateful.
        assert node in builder._done
    return [builder.result(value) for value in program.outputs]


def _input_dims(builder: Builder, value: Any, state: State) -> tuple[Dim, ...] | None:
    if value.rank is None:
        return None
    builder.extents.named[value.key] = value
    found = []
    for axis, extent in enumerate(value.shape.as_list()):
        if isinstance(state, Rows) and axis == state.axis:
            found.append(builder.extent(state))
        else:
            found.append(Dim(extent) if extent is not None else Dim.unknown("extent", value.key, axis))
    return tuple(found)
