"""Variables: every rank has them whole; rows of a table are looked up by rows of indices."""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import Partial


@rule("ResourceGather")
def look_up(b: Any, node: Any) -> Any:
    table, indices = node.inputs
    state = b.state(indices)
    if isinstance(state, Partial) or node.attr("batch_dims"):
        return None
    return [(b.make(node, [b.whole(table), b.held(indices)])[0], state)]
