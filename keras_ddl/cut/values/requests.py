"""Collects requests for sums, reduce-scatters, all-gathers and rows of tables until nothing else can be built.

Values that are requested together do not depend on one another's results, so they are sent in buckets, in the order in
which they become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from keras_ddl.communicator import step_names
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.placements import FLAT_SHARD, REPLICATED, Pending, PlacedTensor
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.analysis.report import Report
from keras_ddl.cut.analysis.work import bytes_of
from keras_ddl.cut.values import flat_shards, row_exchange
from keras_ddl.cut.values.collectives import Collectives, Depths, Reduction
from keras_ddl.cut.values.row_exchange import ReceivedRows, SentRows

REDUCE_SCATTER, ALL_GATHER = "reduce_scatter", "all_gather"
_ALONE = 4 << 20  # flat shards of this many bytes or more are sent alone, because concatenation would copy them


class _Request(NamedTuple):
    tensor: tf.Tensor  # this rank's part
    reader: Node | None  # the node that needs the result


class Requests:
    """The collectives that are requested for the values of one program.

    Attributes: follow_program: whether sums wait only for other sums that the program shows, so that they have depths.
    """

    def __init__(self, collectives: Collectives, report: Report, scope: str = "") -> None:
        self._collectives, self._report, self._scope = collectives, report, scope
        self.follow_program = True
        self._by_kind: dict[str, dict[Value, _Request]] = {}
        self._sent: dict[Hashable, SentRows] = {}
        self._received: dict[Hashable, ReceivedRows] = {}
        self._count = 0

    def add(self, kind: str, value: Value, tensor: tf.Tensor, reader: Node | None) -> None:
        """Requests a collective for a value.

        kind: the op of a reduction; REDUCE_SCATTER: this rank's flat shard of a sum of parts; ALL_GATHER: the global
            tensor, of flat shards.
        """
        self._by_kind.setdefault(kind, {}).setdefault(value, _Request(tensor, reader))

    def exchange(self, key: Hashable, rows: Callable[[], SentRows]) -> ReceivedRows:
        """Returns the rows that this rank receives when all ranks send rows. `rows`: makes its rows; called once.

        Raises: Pending: the rows will be sent later, together with rows that are requested until then.
        """
        if key not in self._received:
            if key not in self._sent:
                self._sent[key] = rows()
            raise Pending
        return self._received[key]

    def has(self, kind: str, value: Value) -> bool:
        return value in self._by_kind.get(kind, {})

    def __bool__(self) -> bool:
        return bool(self._by_kind or self._sent)

    def make(self, rounds: int) -> tuple[dict[Value, PlacedTensor], dict[Value, tf.Tensor]]:
        """Makes the collectives. If rows must be sent, it sends only these, so that more sums accumulate. COLLECTIVE.

        rounds: number of rounds of earlier collectives that these may wait for.
        Returns: (parts that were replicated or scattered; flat shards that were gathered).
        """
        if not self:
            raise AssertionError("the cut does not finish: no value is requested, and nodes are left")
        prefix = step_names.after(self._scope, rounds)
        if self._sent:
            self._move_rows(prefix)
            return {}, {}
        by_kind, self._by_kind = self._by_kind, {}
        scatters, gathers = by_kind.pop(REDUCE_SCATTER, {}), by_kind.pop(ALL_GATHER, {})
        with tf.control_dependencies(None):
            sums = self._reduce(by_kind, prefix)
            scatters = {value: each for value, each in scatters.items() if value not in sums}
            chunks = self._move(REDUCE_SCATTER, scatters, prefix)
            gathered = self._move(ALL_GATHER, gathers, prefix)
        placed = {value: PlacedTensor(tensor, REPLICATED) for value, tensor in sums.items()}
        placed.update((value, PlacedTensor(tensor, FLAT_SHARD)) for value, tensor in chunks.items())
        return placed, gathered

    def _name(self, prefix: str, kind: str) -> str:
        self._count += 1
        return f"{prefix}{kind}_{self._count - 1}"

    def _reduce(self, by_op: Mapping[str, Mapping[Value, _Request]], prefix: str) -> dict[Value, tf.Tensor]:
        done: dict[Value, tf.Tensor] = {}
        requests = {value: each for some in by_op.values() for value, each in some.items()}
        kinds = {v: (op, self._collectives.compresses(v, op)) for op, some in by_op.items() for v in some}
        order = _in_order(requests)
        for op, compressed in dict.fromkeys(kinds[value] for value in order):
            values = [value for value in order if kinds[value] == (op, compressed)]
            # Open extents count as 1, because the plan must not depend on the batch.
            for bucket in self._buckets(values, [bytes_of([value], extent=1) for value in values]):
                parts = [_numeric(requests[value].tensor) for value in bucket]
                nodes = [value.node.depth for value in bucket]
                depths = Depths(min(nodes), max(nodes)) if self.follow_program else None
                name = self._name(prefix, op)
                result = self._collectives.reduce(parts, op, name, Reduction(depths, compressed))
                for value, tensor in zip(bucket, result):
                    tensor = tf.cast(tensor, tf.bool) if value.dtype == tf.bool else tensor
                    tensor.set_shape(requests[value].tensor.shape)
                    done[value] = tensor
                self._report.bucketed(op, bucket, [requests[value].reader for value in bucket], compressed)
        return done

    def _move(self, kind: str, requests: Mapping[Value, _Request], prefix: str) -> dict[Value, tf.Tensor]:
        done: dict[Value, tf.Tensor] = {}
        order = _in_order(requests)
        sizes = {value: bytes_of([value]) for value in order}
        small = [value for value in order if sizes[value] < _ALONE]
        buckets = self._buckets(small, [sizes[value] for value in small]) if small else []
        buckets += [[value] for value in order if sizes[value] >= _ALONE]
        move = flat_shards.reduce_scatter if kind == REDUCE_SCATTER else flat_shards.all_gather
        for bucket in sorted(buckets, key=lambda bucket: _place(bucket[-1])):
            layouts = [flat_shards.layout_of(value, self._collectives.size) for value in bucket]
            tensors = [requests[value].tensor for value in bucket]
            done.update(zip(bucket, move(self._collectives, tensors, layouts, self._name(prefix, kind))))
            self._report.bucketed(kind, bucket, [requests[value].reader for value in bucket])
        return done

    def _move_rows(self, prefix: str) -> None:
        sent, self._sent = self._sent, {}
        for kind in dict.fromkeys(each.kind for each in sent.values()):
            some = {key: each for key, each in sent.items() if each.kind == kind}
            nodes = [each.of.node.depth for each in some.values()]
            depths = Depths(min(nodes), max(nodes)) if self.follow_program else None
            with tf.control_dependencies(None):
                received = row_exchange.all_to_all(
                    self._collectives, list(some.values()), self._name(prefix, "all_to_all"), depths
                )
            self._received.update(zip(some, received))
            self._report_rows(list(some.values()))

    def _report_rows(self, sent: Sequence[SentRows]) -> None:
        shapes = [each.of.shape for each in sent]
        is_known = all(each.is_fully_defined() for each in shapes)
        bytes_ = sum(n.num_elements() * each.entry_bytes for n, each in zip(shapes, sent)) if is_known else None
        counts = 2 if len(sent) > 1 and sent[0].received is None else 1
        nodes, values = [each.node for each in sent], [each.of for each in sent]
        tables = sorted({each.table_bytes for each in sent if each.table_bytes is not None})
        self._report.moved_rows(nodes, values, bytes_, tables, counts)

    def _buckets(self, values: Sequence[Value], sizes: Sequence[int]) -> list[list[Value]]:
        dtypes = ["uint8" if value.dtype == tf.bool else value.dtype.name for value in values]
        return [[values[i] for i in bucket] for bucket in self._collectives.buckets(sizes, dtypes)]


def _place(value: Value) -> tuple[int, int, int]:
    return value.node.depth, value.node.position, value.index


def _in_order(requests: Mapping[Value, _Request]) -> list[Value]:
    return sorted(requests, key=_place)


def _numeric(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tensor
