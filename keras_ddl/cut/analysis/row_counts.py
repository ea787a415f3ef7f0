"""How many rows a sum by index has, where tracing does not know it because the number came out of a branch or into one.

A gradient of a table that a branch has looked up, or that a branch adds to the table, is such a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from keras_ddl.cut.analysis.program import BRANCHES, Node, Program, Value

Numbers: TypeAlias = Mapping[Value, Sequence[int]]  # entries of integer placeholders that are known when tracing ends


def learn_row_counts(program: Program, numbers: Numbers) -> None:
    """Sets the shapes of sums by index whose number of rows is known. numbers: of the program's placeholders."""
    for node in program.nodes:
        if node.type == "UnsortedSegmentSum":
            (table,) = node.outputs
            if table.rank and table.shape[0] is None:
                count = _entries(node.inputs[2], numbers)
                if count is not None:
                    table.learn_shape([int(np.reshape(count, [])), *table.shape.as_list()[1:]])


def numbers_inside(program: Program, node: Node, numbers: Numbers) -> Numbers:
    """Returns what is known of the placeholders of a branch of `node`."""
    known = {
        value: _entries(outer, numbers)
        for value, outer in zip(program.placeholders, node.inputs[1:])
        if outer.dtype.is_integer and outer.rank in (0, 1)
    }
    return {value: np.ravel(each).tolist() for value, each in known.items() if each is not None}


def _entries(value: Value, numbers: Numbers) -> Any:
    """Returns the entries of an integer tensor as an array; None: not known."""
    value = value.source()
    node, constant = value.node, value.constant()
    if constant is not None:
        return constant
    if value in numbers:
        return np.reshape(numbers[value], [-1] * (value.rank or 0))
    if node.type == "Cast" and node.inputs[0].dtype.is_integer:
        return _entries(node.inputs[0], numbers)
    if node.type == "StridedSlice" and node.attr("shrink_axis_mask", int) == 1:
        entries, begin = _entries(node.inputs[0], numbers), node.inputs[1].constant()
        if entries is None or begin is None or np.ndim(entries) != 1 or np.size(begin) != 1:
            return None
        return entries[int(np.ravel(begin)[0])]
    return _of_branches(value, numbers) if node.type in BRANCHES else None


def _of_branches(value: Value, numbers: Numbers) -> Any:
    graphs, found = value.node.branch_graphs(), []
    for graph in graphs:
        if graph is None or len(graph.inputs) != len(value.node.inputs) - 1:
            return None
        program = Program(graph)
        found.append(_entries(program.outputs[value.index], numbers_inside(program, value.node, numbers)))
    is_known = all(each is not None and np.array_equal(each, found[0]) for each in found)
    return found[0] if found and is_known else None
