"""Computes, on one rank, in which order rows of tables travel to their owners, and what of them need not travel twice.

Numbers of rows are int64 vectors with an entry for each rank.
"""

from __future__ import annotations

from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.values.layouts import Layout


class Sorted(NamedTuple):
    """Indices of rows, sorted by owner.

    Attributes:
        order: the positions that they had before.
        sent: how many of them each rank owns.
    """

    ids: tf.Tensor
    order: tf.Tensor
    sent: tf.Tensor


class Wanted(NamedTuple):
    """The rows of a table that this rank looks up.

    Attributes:
        ids: the distinct indices, by owner.
        counts: how often each is looked up.
        at: the position in `ids` of each look-up, in the shape of the indices. Indices out of range stay out of range.
        slots: `at` as a vector, in which an index out of range has the position of the nearest row.
    """

    ids: Sorted
    counts: tf.Tensor
    at: tf.Tensor
    slots: tf.Tensor


class Asked(NamedTuple):
    """The rows of this rank's chunk that the ranks look up.

    Attributes:
        received: how many rows each rank asks for.
        places: the rows' positions in this rank's chunk, rank after rank.
        counts: how often the rank that asks looks up each.
    """

    received: tf.Tensor
    places: tf.Tensor
    counts: tf.Tensor


class Route(NamedTuple):
    """The way of some rows from this rank to their owners.

    Attributes:
        order: the positions of the rows, in the order in which they are sent.
        sent, received: how many rows go to each rank, and come from it.
        places: the positions of the received rows in this rank's chunk.
    """

    order: tf.Tensor
    sent: tf.Tensor
    received: tf.Tensor
    places: tf.Tensor


class FewRows(NamedTuple):
    """The distinct rows among some rows, for each owner.

    Attributes:
        sent: how many distinct rows each owner gets.
        numbers: for each of the rows, in the order of their route, which of the distinct rows for its owner it is.
    """

    rows: tf.Tensor
    sent: tf.Tensor
    numbers: tf.Tensor


def by_owner(ids: tf.Tensor, layout: Layout) -> Sorted:
    """Sorts indices by owner; those of one owner stay in their order."""
    begins = tf.constant([layout.rows_of(rank)[0] for rank in range(1, layout.size)], ids.dtype)
    owners = tf.searchsorted(begins, ids, side="right")
    order = tf.argsort(owners, stable=True)
    return Sorted(tf.gather(ids, order), order, _counted(owners, layout.size))


def wanted(at: tf.Tensor, layout: Layout) -> Wanted:
    """Returns the rows at some indices."""
    existing = tf.clip_by_value(at, 0, layout.rows - 1)
    distinct, place, counts = tf.unique_with_counts(tf.reshape(existing, [-1]))
    ids = by_owner(distinct, layout)
    slots = tf.gather(tf.math.invert_permutation(ids.order), place)
    place = tf.cast(tf.reshape(slots, tf.shape(at)), at.dtype)
    # An index that no row has stays out of range, so that the look-up fails as in one process.
    return Wanted(ids, tf.gather(counts, ids.order), tf.where(at == existing, place, at), slots)


def way_back(wanted: Wanted, asked: Asked) -> Route:
    """Returns the way of rows, one for each index that was looked up, to the owners.

    Rows of one index are sent one after another, in their order, so that their number says whose they are.
    """
    received = _sums(asked.counts, asked.received)
    places = tf.gather(asked.places, repeated(asked.counts, tf.reduce_sum(received)))
    order = tf.argsort(wanted.slots, stable=True)
    return Route(order, _sums(wanted.counts, wanted.ids.sent), received, places)


def tiled(few: tf.Tensor, many: tf.Tensor) -> tf.Tensor:
    """Returns, for each of the rows `many`, which of the rows `few` it is: axes between the first and the last repeat
    them."""
    shape, of_few = tf.shape(many, tf.int64)[:-1], tf.shape(few, tf.int64)[:-1]
    number = tf.reshape(tf.range(tf.reduce_prod(of_few)), of_few)
    return tf.reshape(tf.tile(number, shape // tf.maximum(of_few, 1)), [-1])


def few_rows(few: tf.Tensor, number: tf.Tensor, route: Route, layout: Layout) -> FewRows:
    """Returns the distinct ones of rows that repeat the rows `few`. `number`: for each row, which of `few` it is."""
    count = tf.reduce_prod(tf.shape(few, tf.int64)[:-1])
    number = tf.gather(tf.cast(number, tf.int64), route.order)
    owner = tf.cast(repeated(route.sent, tf.size(number)), tf.int64)
    pairs, place = tf.unique(owner * count + number)  # as they come, that is, sorted by owner
    count = tf.maximum(count, 1)
    sent = _counted(tf.cast(pairs // count, tf.int32), layout.size)
    begin = tf.gather(tf.cumsum(sent, exclusive=True), owner)
    rows = tf.gather(tf.reshape(few, [-1, layout.unit]), pairs % count)
    return FewRows(rows, sent, place - tf.cast(begin, tf.int32))


def of_few_rows(rows: tf.Tensor, counts: tf.Tensor, numbers: tf.Tensor, route: Route) -> tf.Tensor:
    """Returns the rows of a route at their owner, which has received the distinct ones; `counts`: how many from each
    rank."""
    begin = tf.gather(tf.cumsum(counts, exclusive=True), repeated(route.received, tf.size(numbers)))
    return tf.gather(rows, tf.cast(numbers, tf.int64) + begin)


def entries(places: tf.Tensor, width: int) -> tf.Tensor:
    """Returns the places of the entries of rows [n, width] of a table, given the places of the rows."""
    return tf.cast(places, tf.int64)[:, tf.newaxis] * width + tf.range(width, dtype=tf.int64)


def repeated(counts: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Returns 0 `counts[0]` times, 1 `counts[1]` times, and so on; `total`: the sum of the counts."""
    ends = tf.cumsum(tf.cast(counts, tf.int64))
    numbers = tf.range(tf.cast(total, tf.int64))
    return tf.raw_ops.UpperBound(sorted_inputs=ends[tf.newaxis], values=numbers[tf.newaxis])[0]


def _counted(ranks: tf.Tensor, size: int) -> tf.Tensor:
    """Returns how often each rank occurs."""
    unweighted = tf.zeros([0], tf.int64)
    return tf.raw_ops.DenseBincount(input=ranks, size=tf.constant(size), weights=unweighted, binary_output=False)


def _sums(counts: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the first `sent[0]` counts, of the next `sent[1]`, and so on."""
    totals = tf.pad(tf.cumsum(tf.cast(counts, tf.int64)), [[1, 0]])
    ends = tf.gather(totals, tf.cumsum(sent))
    return ends - tf.pad(ends, [[1, 0]])[:-1]
