"""Builds a While operation from existing graphs.

tf.while_loop takes functions instead, spends half of its time building their graphs, and adds a counter for gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from keras_ddl.compat.tensorflow import (
    auto_control_deps,
    auto_control_deps_utils,
    control_flow_util_v2,
    control_flow_v2_func_graphs,
    create_op,
    handle_data_util,
    is_stateful,
    tf,
)


class LoopGraph:
    """The graph of a loop's body or condition. Create it inside the graph that will contain the loop.

    Args:
        label: "body" or "condition".
        has_effects: its side effects must keep the program's order.
    Attributes:
        graph: the FuncGraph.
        carried: placeholders of the loop values.
    """

    def __init__(self, label: str, *, has_effects: bool) -> None:
        name = control_flow_util_v2.unique_fn_name("while/", label)
        graphs = control_flow_v2_func_graphs
        kind = graphs.WhileCondFuncGraph if label == "condition" else graphs.WhileBodyFuncGraph
        self.graph: Any = kind(name)
        self.carried: list[tf.Tensor] = []
        self._order: Any = auto_control_deps.AutomaticControlDependencies() if has_effects else None

    def carry(self, starts: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]) -> None:
        """Makes placeholders for loop values with initial values `starts` and fixed shapes."""
        self.carried = [tf.compat.v1.placeholder(start.dtype, shape) for start, shape in zip(starts, shapes)]
        self.graph.inputs = list(self.carried)
        for start, tensor in zip(starts, self.carried):
            copy_element_kind(start, tensor)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Adds the operations built in the block to this graph."""
        with self.graph.as_default(), self._order or contextlib.nullcontext():
            yield
        if self._order is not None:
            self.graph.control_outputs.extend(self._order.ops_which_must_run)

    def end(self, tensors: Sequence[tf.Tensor]) -> None:
        """Sets the outputs."""
        mark = tf.identity if self._order is None else self._order.mark_as_return
        self.graph.outputs = [mark(each) for each in tensors]

    def share_captures(self, other: LoopGraph) -> None:
        """Captures, first and in the same order, the tensors that another graph captures from the enclosing graph."""
        with self.graph.as_default():
            for each in other.graph.external_captures:
                self.graph.capture(each)


def copy_element_kind(source: tf.Tensor, target: tf.Tensor) -> None:
    """Copies the known element shape and dtype of a list from `source` to a placeholder."""
    handle_data_util.copy_handle_data(source, target)


def while_op(
    condition: LoopGraph,
    body: LoopGraph,
    starts: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
    at_once: int,
) -> tf.Operation:
    """Builds the loop, as tf.while_loop does. `condition` must have begun with the captures of `body`.

    shapes: shapes of the loop values in all rounds.
    at_once: number of rounds that may run at a time.
    """
    body.share_captures(condition)
    graph = tf.compat.v1.get_default_graph()
    captured = body.graph.external_captures
    ends = [*body.graph.outputs, *body.graph.internal_captures]
    body.graph.outputs = ends
    graphs = condition.graph, body.graph
    for each in graphs:
        each.inputs = [*each.inputs[: len(starts)], *each.internal_captures]
        control_flow_util_v2.create_new_tf_function(each)
    has_effects = any(is_stateful(op) for each in graphs for op in each.get_operations())
    read = set.intersection(
        *(set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(each)) for each in graphs)
    )
    dtypes = [each.dtype for each in ends]
    result_shapes = [*shapes, *(each.shape for each in ends[len(shapes) :])]
    value, values = tf.compat.v1.AttrValue, tf.compat.v1.AttrValue.ListValue
    attributes = {
        "T": value(list=values(type=[each.as_datatype_enum for each in dtypes])),
        "cond": value(func={"name": condition.graph.name}),
        "body": value(func={"name": body.graph.name}),
        "output_shapes": value(list=values(shape=[each.as_proto() for each in result_shapes])),
        "parallel_iterations": value(i=at_once),
        # Lets operations after the loop run in parallel if the loop only reads their variables.
        auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR: value(list=values(i=sorted(read))),
    }
    after = [op for each in graphs for op in each.function_captures.control]
    kind = "While" if has_effects else "StatelessWhile"
    with tf.control_dependencies(after):
        result = create_op(graph, kind, [*starts, *captured], dtypes, attrs=attributes, name="while")
    for end, tensor in zip(ends, result.outputs):
        handle_data_util.copy_handle_data(end, tensor)
    control_flow_util_v2.maybe_set_lowering_attr(result)
    control_flow_util_v2.maybe_propagate_compile_time_consts_in_xla(result)
    return result
