"""How a builder makes what is computed of variables that are held in shards. States and layout: shards.py.

Entrywise operations are made of chunks, reductions of chunks give parts, and a weight that is assigned a shard is not
written at once: what follows in the step reads the new shard, and the whole is put together when something needs it, at
the latest at the end. So a weight that is decayed, updated and averaged in one step travels once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import shards
from keras_ddl.cut.factors import row_of
from keras_ddl.cut.pieces import Waiting
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.propagation import of_parts
from keras_ddl.cut.shard_plan import (
    ASSIGNS,
    BRANCHES,
    ENTRYWISE,
    PASSED_ON,
    READ,
    REDUCTIONS,
    Plan,
    is_operand,
    reduces_all,
)
from keras_ddl.cut.states import PARTIAL, SHARD, WHOLE, Partial
from keras_ddl.errors import ConfigError

if TYPE_CHECKING:
    from keras_ddl.cut.builder import Builder

_SCATTERS = {"ResourceScatterAdd": "Add", "ResourceScatterSub": "Sub", "ResourceScatterUpdate": ""}
_OF_HOST = ("PyFunc", "PyFuncStateless", "EagerPyFunc")  # they may read variables of which the graph shows nothing


@dataclass(eq=False)
class NewWeight:
    """The shard that a weight has been assigned, and is to be put together of. It is asked for as a `Value` is."""

    chunk: tf.Tensor
    handle: Any
    shape: tf.TensorShape
    dtype: tf.DType
    node: Node
    before: list[tf.Operation]
    index: int = -1
    waiting: bool = field(default=False)

    @property
    def rank(self) -> int | None:
        return self.shape.rank

    @property
    def key(self) -> str:
        return self.node.key


class Sharding:
    """What one builder has in shards."""

    def __init__(self, builder: Builder) -> None:
        self._b = builder
        self._handles: set[Value] = set()
        self._plan: Plan | None = None
        self._new: dict[Any, NewWeight] = {}  # by handle, as is
        self._gathered: dict[NewWeight, tf.Tensor] = {}
        self._written: dict[Any, tf.Operation] = {}  # the assignments made here

    def hold(self, handle: Value) -> None:
        """Says that a variable is held in shards."""
        self._handles.add(handle)

    @property
    def is_on(self) -> bool:
        """Whether there is such a variable."""
        return bool(self._handles)

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = Plan(self._b.program, self._handles)
        return self._plan

    def take(self, wholes: dict[Any, tf.Tensor]) -> None:
        """Takes what was put together of the shards of weights."""
        self._gathered.update((new, whole) for new, whole in wholes.items() if isinstance(new, NewWeight))

    # ---- one operation

    def make(self, node: Node) -> list[Any] | None:
        """Returns the pieces of an operation of shards; None for all others, which then have none among their inputs.
        Raises: Waiting.
        """
        b = self._b
        handles = [each for each in node.inputs if each.dtype == tf.resource]
        if node.type == READ and (b.state(node.inputs[0]) == SHARD or self._key(node.inputs[0]) in self._new):
            return self._read(node)
        if node.type in ASSIGNS and b.state(node.inputs[0]) == SHARD:
            b.make(node, [b.held(node.inputs[0]), b.shard(node.inputs[1])])
            return []
        if node.type in ASSIGNS and self._assign(node):
            return []
        if node.type in _SCATTERS and b.state(node.inputs[0]) == SHARD:
            return self._scatter(node)
        keys = [*self._new, *self._written] if node.type in _OF_HOST else [self._key(each) for each in handles]
        self._write([each for each in keys if each in self._new])
        written = [self._written[each] for each in keys if each in self._written]
        with tf.control_dependencies(list(dict.fromkeys(written))):
            if node.type in BRANCHES:
                return None
            found = self._of_chunks(node)
            if found is not None:
                return found
            self._settle(node)
            # Made here, where it waits for what was written.
            return b.apply_rules(node) if written else None

    def _read(self, node: Node) -> list[Any]:
        new = self._new.get(self._key(node.inputs[0]))
        return [(self._b.make(node, [self._b.held(node.inputs[0])])[0] if new is None else new.chunk, SHARD)]

    def _key(self, handle: Value) -> Any:
        """A branch may be given a variable twice."""
        return self._b.held(handle).ref()

    def _assign(self, node: Node) -> bool:
        """Keeps the shard that a weight is assigned. False: it is assigned as a whole."""
        b = self._b
        handle, value = node.inputs
        key, of_shard = self._key(handle), b.state(value) == SHARD
        if b.state(handle) != WHOLE or not (of_shard or key in self._new):
            return False
        if node.type == "AssignVariableOp":
            if not of_shard:
                whole = b.whole(value)
                del self._new[key]  # never to be seen
                b.make(node, [b.held(handle), whole])
                return True
            chunk = b.held(value)
        else:
            change = b.shard(value)
            old = self._new[key].chunk if key in self._new else self._own_chunk(node)
            chunk = old + change if node.type == "AssignAddVariableOp" else old - change
        written = [self._written[key]] if key in self._written else []
        before = [*b.before, *b.made_now(), *written]
        self._new[key] = NewWeight(chunk, b.held(handle), value.shape, value.dtype, node, before)
        return True

    def _own_chunk(self, node: Node) -> tf.Tensor:
        b = self._b
        handle, value = node.inputs
        if b.writes is not None and not b.writes.is_early(b.held(handle)):
            whole = b.writes.value(b.held(handle), value.dtype)
        else:
            written = self._written.get(self._key(handle))
            with tf.control_dependencies([] if written is None else [written]):
                whole = tf.raw_ops.ReadVariableOp(resource=b.held(handle), dtype=value.dtype)
            b.ran(whole.op)
        whole.set_shape(value.shape)
        return b.exchange.layout(value).cut(whole, b.collectives.rank)

    def _of_chunks(self, node: Node) -> list[Any] | None:
        b = self._b
        values = node.inputs
        states = [b.state(each) for each in values]
        has_shards = SHARD in states
        parts = [value for value, state in zip(values, states) if state == PARTIAL and value in self.plan.towards]
        if node.type in PASSED_ON or node.type == "IdentityN":
            return None
        if node.type in ("Shape", "Size", "Rank") and has_shards:
            return self._shape(node)
        if node.type in REDUCTIONS and (has_shards or parts and node.type not in ("Sum", "Mean")):
            return self._reduced(node) if reduces_all(node) else None
        output = node.outputs[0] if len(node.outputs) == 1 else None
        if output is None or not has_shards and output not in self.plan.towards and not parts:
            return None
        if node.type == "Fill" and output in self.plan.only:
            count = b.exchange.layout(output).chunk(b.collectives.rank)[1]
            return [(tf.fill([count], b.whole(values[1])), SHARD)]
        if node.type not in ENTRYWISE or not _is_entrywise(node):
            return None
        if not has_shards and not parts and (output not in self.plan.only or any(each != WHOLE for each in states)):
            return None
        if PARTIAL in states and not has_shards and self._goes_on_as_part(node):
            found = of_parts(b, node)
            if found is not None:
                return found
        return [(self._entrywise(node), SHARD)]

    def _goes_on_as_part(self, node: Node) -> bool:
        """Whether to sum after an operation rather than before: where there is one sum then, and not one more."""
        readers = [self._b.program.readers(each) for each in node.inputs if self._b.state(each) == PARTIAL]
        return node.type == "Cast" or len(readers) > 1 or all(len(each) == 1 for each in readers)

    def _entrywise(self, node: Node) -> tf.Tensor:
        b = self._b
        operands = [each for each in node.inputs if is_operand(each, node)]
        b.shards(operands)
        b.wholes([each for each in node.inputs if each not in operands])
        return b.make(
            node, [b.shard(each) if each in operands else tf.reshape(b.whole(each), []) for each in node.inputs]
        )[0]

    def _shape(self, node: Node) -> list[Any]:
        shape, dtype = node.inputs[0].shape, node.outputs[0].dtype
        found = {"Shape": shape.as_list(), "Size": shape.num_elements(), "Rank": shape.rank}[node.type]
        return [(tf.constant(found, dtype), WHOLE)]

    def _reduced(self, node: Node) -> list[Any]:
        b, value = self._b, node.inputs[0]
        chunk, output = b.shard(value), node.outputs[0]
        if node.type == "L2Loss":
            return [(b.make(node, [chunk])[0], PARTIAL)]
        if node.type == "Mean":
            found = tf.reduce_sum(chunk) / tf.cast(value.shape.num_elements(), chunk.dtype)
        else:
            found = b.make(node, [chunk, tf.constant([0], node.inputs[1].dtype)], keep_dims=_FALSE)[0]
        row = row_of(node.type)
        return [(tf.reshape(found, output.shape), Partial(row.combine if row is not None and row.combine else "sum"))]

    def _scatter(self, node: Node) -> list[Any]:
        """Adds rows to those of a table that lie on this rank."""
        b = self._b
        handle, indices, updates = node.inputs
        shape = tf_compat.variable_shape(handle.tensor)
        layout = shards.Layout(tuple(shape.as_list()), b.collectives.size)
        b.wholes([indices, updates])
        at = tf.cast(tf.reshape(b.whole(indices), [-1, 1]), tf.int64)
        width = shape.num_elements() // shape.as_list()[0]
        rows = tf.reshape(b.whole(updates), [-1, width])
        first, count = layout.chunk(b.collectives.rank)
        entries = at * width + tf.range(width, dtype=tf.int64)[tf.newaxis] - first
        mine = tf.where((entries >= 0) & (entries < count))
        operands = [b.held(handle), tf.gather_nd(entries, mine), tf.gather_nd(rows, mine)]
        b.make(node, operands, Tindices=tf.compat.v1.AttrValue(type=tf.int64.as_datatype_enum))
        return []

    def _settle(self, node: Node) -> None:
        """Makes whole what an operation without a rule reads in shards."""
        b = self._b
        for value in node.inputs:
            if b.state(value) == SHARD and value.dtype == tf.resource:
                raise self.refusal(node)
        wanted = [each for each in node.inputs if b.state(each) == SHARD]
        if wanted and node.type not in PASSED_ON and node.type != "IdentityN":
            b.wholes(wanted)
            for value in wanted:
                b.make_it_whole(value)

    def refusal(self, node: Node | None) -> ConfigError:
        """Returns the error for an operation that a variable in shards is no operand of."""
        return ConfigError(
            "A variable that an optimizer keeps in shards may only be read, assigned and added to in a step, outside "
            f"of loops. Received: {node} (rank {self._b.collectives.rank}). Make the Strategy without shard_optimizer."
        )

    # ---- weights

    def _write(self, due: list[Any]) -> None:
        """Writes weights of which there are new shards. Raises: Waiting: until they have been put together."""
        b = self._b
        late = [each for each in due if self._new[each] not in self._gathered]
        for each in late:
            b.exchange.want_gather(self._new[each], self._new[each].chunk, b.node)
        if late:
            raise Waiting
        for each in due:
            new = self._new.pop(each)
            with tf.control_dependencies(None), tf.control_dependencies(new.before):
                written = b.assign("AssignVariableOp", new.handle, self._gathered.pop(new))
            if written is not None:
                self._written[each] = written

    def finish(self) -> bool:
        """Writes all weights. False: they have yet to be put together."""
        try:
            self._write(list(self._new))
        except Waiting:
            return False
        return True


_FALSE = tf.compat.v1.AttrValue(b=False)


def _is_entrywise(node: Node) -> bool:
    """Whether all operands are of the result's shape, or one number."""
    output = node.outputs[0]
    if output.rank is None or not output.shape.is_fully_defined():
        return False
    return all(
        is_operand(each, node) or each.rank is not None and each.shape.num_elements() == 1 for each in node.inputs
    ) and any(is_operand(each, node) for each in node.inputs)
