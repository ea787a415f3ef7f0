"""Exchanges rows between ranks: rows of several tensors of one dtype and width are sent together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.values.collectives import Collectives, Depths


class SentRows(NamedTuple):
    """Rows of this rank for other ranks.

    Attributes:
        rows: the rows, sorted by the rank that receives them.
        sent: int64 [size], the number of rows for each rank.
        received: the number of rows from each rank; None: only the other ranks know.
        node: the operation that needs the rows.
        of: the value that has the rows as entries, or that looks them up.
        entry_bytes: the largest number of bytes sent for one entry of `of`.
        table_bytes: the size of the table, which need not be sent; None: the rows are indices.
    """

    rows: tf.Tensor
    sent: tf.Tensor
    received: tf.Tensor | None
    node: Node
    of: Value
    entry_bytes: int
    table_bytes: int | None

    @property
    def kind(self) -> tuple[tf.DType, tuple[int | None, ...], bool]:
        """The key of rows that can be sent together."""
        return self.rows.dtype, tuple(self.rows.shape.as_list()[1:]), self.received is None


class ReceivedRows(NamedTuple):
    """Rows from all ranks, in the order of the ranks. `counts`: how many come from each, int64 [size]."""

    rows: tf.Tensor
    counts: tf.Tensor


def all_to_all(
    collectives: Collectives, sent: Sequence[SentRows], name: str, depths: Depths | None = None
) -> list[ReceivedRows]:
    """Sends rows of one kind in one collective, and their numbers in another one if a rank does not know them.

    COLLECTIVE.

    Cost: every row is sent once, directly to its rank.
    """
    if len(sent) == 1:
        return [ReceivedRows(*collectives.all_to_all(sent[0].rows, sent[0].sent, name, depths))]
    size, number = collectives.size, len(sent)
    by_rank = [tf.split(each.rows, each.sent, num=size) for each in sent]
    joined = tf.concat([rows[rank] for rank in range(size) for rows in by_rank], axis=0)
    to_each = tf.stack([each.sent for each in sent], axis=1)
    rows, _ = collectives.all_to_all(joined, tf.reduce_sum(to_each, axis=1), name, depths)
    known = [each.received for each in sent if each.received is not None]
    if len(known) == number:
        counts = tf.stack(known, axis=1)
    else:
        counts, _ = collectives.all_to_all(to_each, tf.ones([size], tf.int64), f"{name}/counts", depths)
        counts.set_shape([size, number])
    parts = tf.split(rows, tf.reshape(counts, [size * number]), num=size * number)
    return [ReceivedRows(tf.concat(parts[i::number], axis=0), counts[:, i]) for i in range(number)]
