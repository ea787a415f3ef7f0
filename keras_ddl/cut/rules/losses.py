"""Operations along the last axis, each row by itself: softmax, cross entropies, the best k."""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import Rows


@rule("Softmax", "LogSoftmax")
def softmax(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state = b.state(value)
    if not isinstance(state, Rows) or value.rank is None or state.axis == value.rank - 1:
        return None
    return [(b.make(node, [b.held(value)])[0], state)]


@rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits", "InTopKV2", "InTopK")
def of_rows(b: Any, node: Any) -> Any:
    """Logits [rows, classes] with labels of the same rows."""
    cuts = [b.state(each) for each in node.inputs[:2] if isinstance(b.state(each), Rows)]
    rows = next((each for each in cuts if each.axis == 0), None)
    if rows is None or any(not b.fits(each, rows) for each in node.inputs[:2]):
        return None
    b.wholes(node.inputs[2:])
    made = b.make(node, [*(b.cut(each, rows) for each in node.inputs[:2]), *map(b.whole, node.inputs[2:])])
    return [(each, rows) for each in made]


@rule("TopKV2")
def top_k(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state = b.state(value)
    if not isinstance(state, Rows) or value.rank is None or state.axis == value.rank - 1:
        return None
    return [(each, state) for each in b.make(node, [b.held(value), *map(b.whole, node.inputs[1:])])]
