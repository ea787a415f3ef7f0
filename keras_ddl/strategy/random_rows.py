"""Random numbers of a rank's rows: those that one process would have drawn for them.

Keras's random numbers come from counter-based generators (Philox: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011): the n-th number of a draw follows from the seed and n alone. All ranks hold equal seeds. Inside a
step a draw of shape [rows of this rank, ...] takes those rows of the draw for the whole global batch, by moving the
counter to the first of them; no more numbers are drawn than without. Any other draw is equal on all ranks.

What counts as rows is decided by the first dimension of the draw:

- It is known only when the step runs, as usual: it counts as rows if it is the number of this rank's rows, or a
  multiple, where each row has become several (windows, time steps).
- It is known when the step is traced (run_eagerly=True, batches of fixed size): it counts as rows if it is the number
  of this rank's rows, or, for dropout, a multiple, if what is dropped follows from the batch. In a step that runs
  eagerly that cannot be told: dropout on a multiple is then equal on all ranks, and a warning says so once.
- Rows that `concatenate` has put below each other (a GAN's real and generated ones) keep their order: block by block
  the draw is that of one process. It is found in the graph between the concatenation and the draw.
- In a step without a batch each rank counts as one row.

Normal, uniform and integer numbers and dropout move the counter. Truncated normal, gamma, beta, binomial and
categorical numbers take a number of raw ones that cannot be foreseen, or an operation that does not let the counter be
set: for those every rank draws for the whole batch and keeps its rows.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl.communicator import stack_position
from keras_ddl.compat.tensorflow import constant_value_as_shape, tf
from keras_ddl.cut import philox
from keras_ddl.strategy import step
from keras_ddl.strategy.row_kinds import ROWS, RowKinds
from keras_ddl.strategy.row_share import RowShare

# Operations, by graph, above which there is no concatenation of rows.
_plain: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_warned: set[str] = set()


@dataclass
class _Rows:
    """Which rows of the whole draw a rank takes: `lengths[i]` from `starts[i]` on, of `total` (int64)."""

    starts: list[Any]
    lengths: list[Any]
    total: Any


def normal(share: RowShare, shape: Any, seed: Any, mean: Any, stddev: Any, dtype: Any) -> tf.Tensor:
    """tf.random.stateless_normal, for this rank's rows."""
    shape, static = _shape(shape)
    rows = _rows(share, shape, static)
    if rows is None:
        return tf.random.stateless_normal(shape, seed=seed, mean=mean, stddev=stddev, dtype=dtype)
    raw = _moved(rows, shape, static, seed, tf.as_dtype(dtype), tf.raw_ops.StatelessRandomNormalV2)
    return raw * tf.convert_to_tensor(stddev, raw.dtype) + tf.convert_to_tensor(mean, raw.dtype)


def uniform(
    share: RowShare, shape: Any, seed: Any, minval: Any, maxval: Any, dtype: Any, source: Any = None
) -> tf.Tensor:
    """tf.random.stateless_uniform, for this rank's rows. `source`: the tensor that the numbers are for, if known."""
    shape, static = _shape(shape)
    rows = _rows(share, shape, static, source)
    if rows is None:
        return tf.random.stateless_uniform(shape, seed=seed, minval=minval, maxval=maxval, dtype=dtype)
    dtype = tf.as_dtype(dtype)
    minval = tf.convert_to_tensor(minval, dtype)
    maxval = tf.convert_to_tensor(1 if maxval is None else maxval, dtype)
    if dtype.is_integer:

        def draw(dtype, **arguments):
            return tf.raw_ops.StatelessRandomUniformIntV2(minval=minval, maxval=maxval, **arguments)

        return _moved(rows, shape, static, seed, dtype, draw)
    return _moved(rows, shape, static, seed, dtype, tf.raw_ops.StatelessRandomUniformV2) * (maxval - minval) + minval


def dropout(share: RowShare, inputs: Any, rate: Any, seed: Any, noise_shape: Any = None) -> tf.Tensor:
    """tf.nn.experimental.stateless_dropout, for this rank's rows."""
    inputs = tf.convert_to_tensor(inputs)

    def sample(shape, dtype):
        return uniform(share, shape, seed, 0, 1, dtype, source=inputs)

    return tf.nn.experimental.general_dropout(inputs, rate, sample, noise_shape=noise_shape)


def whole_then_rows(
    share: RowShare, draw: Callable[..., tf.Tensor], shape: Any, by_row: Sequence[Any] = ()
) -> tf.Tensor:
    """Draws for the rows of all ranks and keeps this rank's.

    Args:
        draw: called with the shape to draw and the values of `by_row`.
        by_row: parameters of the distribution; those of as many dimensions as `shape` may have a value for each row.
    Cost: all ranks' rows / this rank's rows times the numbers.
    """
    shape, static = _shape(shape)
    rows = _rows(share, shape, static)
    if rows is None:
        return draw(shape, *by_row)
    by_row = [_spread(tf.convert_to_tensor(each), rows, static.rank) for each in by_row]
    whole = draw(tf.concat([[rows.total], shape[1:]], 0), *by_row)
    parts = [whole[start : start + length] for start, length in zip(rows.starts, rows.lengths)]
    return _together(parts, static)


def warn_once(what: str, message: str) -> None:
    """Warns of `what` once per process."""
    if what not in _warned:
        _warned.add(what)
        stack_position.warn(message)


def _shape(shape: Any) -> tuple[tf.Tensor, tf.TensorShape]:
    """Returns a shape as an int64 tensor, and as far as it is known now."""
    if isinstance(shape, (tuple, list, tf.TensorShape)):
        shape = [tf.cast(each, tf.int64) for each in shape]
    given = tf.convert_to_tensor(shape, tf.int64 if isinstance(shape, list) else None)
    return tf.cast(given, tf.int64), constant_value_as_shape(given)


def _rows(share: RowShare, shape: tf.Tensor, static: tf.TensorShape, source: Any = None) -> _Rows | None:
    """Returns which rows of the whole draw to take; None if the draw is certainly none of rows."""
    if not static.rank:
        return None
    known, mine = static[0], share.static_rows()
    kinds = _kinds(shape)
    if known is None:
        if kinds is not None and kinds.of(shape).name == "shape" and kinds.of(shape).axis != 0:
            return None  # of the form [time steps, rows]
        source = _measured(shape) if source is None else source
        blocks = _concatenated(source, None)
    elif mine is None or (known != mine and (mine == 0 or known % mine)):
        return None
    elif known == mine:
        blocks = None
    else:
        if source is None:
            return None
        if not _is_symbolic(source):
            warn_once(
                "eager multiple",
                f"The first dimension of a dropout, {known}, is a multiple of this rank's rows, {mine}, in a step that "
                "runs eagerly. Whether these are rows cannot be told: the mask is equal on all ranks. Train without "
                "run_eagerly=True to have the mask of one process.",
            )
            return None
        if not _follows_from(source, share.batch()):
            return None
        blocks = _concatenated(source, mine)
    with tf.device("CPU:0"), tf.name_scope("keras_ddl_rows"):
        rows, first, total = share.counts()
        lead = shape[0]
        least = tf.maximum(rows, 1)
        times = lead // least
        are_rows = tf.equal(times * rows, lead)
        if known is None and blocks:
            lengths = [tf.shape(block, tf.int64)[0] for block in blocks]
            folded = lead // tf.maximum(tf.add_n(lengths), 1)  # rows that became several after the concatenation
            fits = [tf.equal(length % least, 0) for length in lengths]
            fits += [are_rows, tf.equal(folded * tf.add_n(lengths), lead)]
            are_blocks = tf.reduce_all(tf.stack(fits))
            lengths = [length * folded for length in lengths]
        elif blocks:
            sizes = [block.shape[0] for block in blocks]
            folded = known // sum(sizes) if sum(sizes) else 0
            are_blocks = tf.constant(folded * sum(sizes) == known)
            lengths = [tf.constant(each * folded, tf.int64) for each in sizes]
        if not blocks:
            start = tf.where(are_rows, first * times, 0)
            return _Rows([start], [lead], tf.where(are_rows, total * times, lead))
        # Without blocks that fit it is one: the first takes everything and the others nothing.
        starts, before = [], tf.constant(0, tf.int64)
        for length in lengths:
            each = length // least
            starts.append(tf.where(are_blocks, before + first * each, 0))
            before += total * each
        starts[0] = tf.where(are_blocks, starts[0], tf.where(are_rows, first * times, 0))
        lengths = [tf.where(are_blocks, length, 0 if i else lead) for i, length in enumerate(lengths)]
        return _Rows(starts, lengths, tf.where(are_rows, total * times, lead))


def _moved(
    rows: _Rows, shape: tf.Tensor, static: tf.TensorShape, seed: Any, dtype: tf.DType, draw: Callable[..., tf.Tensor]
) -> tf.Tensor:
    """Draws `rows` of a larger draw from a generator whose counter is moved to their first number."""
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    known = math.prod(static[1:]) if all(each is not None for each in static[1:]) else None
    in_groups = known is not None and known % philox.numbers_of_a_group(dtype) == 0

    def draw_from(counter: tf.Tensor, shape: Any) -> tf.Tensor:
        return draw(shape=shape, key=key, counter=counter, alg=philox.ALGORITHM, dtype=dtype)

    parts = []
    for start, length in zip(rows.starts, rows.lengths):
        with tf.device("CPU:0"), tf.name_scope("keras_ddl_rows"):
            of_a_row = tf.reduce_prod(shape[1:]) if known is None else tf.constant(known, tf.int64)
            skipped = start * of_a_row
            part_shape = tf.concat([[length], shape[1:]], 0)
        parts.append(philox.stretch(draw_from, counter, skipped, part_shape, dtype, in_groups=in_groups))
    return _together(parts, static)


def _together(parts: list[tf.Tensor], static: tf.TensorShape) -> tf.Tensor:
    result = tf.identity(parts[0]) if len(parts) == 1 else tf.concat(parts, 0)
    result.set_shape(static)
    kinds = _kinds(result)
    if kinds is not None:
        kinds.mark(result, ROWS)
    return result


def _kinds(tensor: tf.Tensor) -> RowKinds | None:
    """Returns what is known of the running step's graph, if `tensor` belongs to one."""
    running = step.innermost()
    return running.values.kinds if running is not None and _is_symbolic(tensor) else None


def _spread(value: tf.Tensor, rows: _Rows, rank: int) -> tf.Tensor:
    """Returns a parameter with a value for each of this rank's rows as one for all rows: ones for the others."""
    if value.shape.rank != rank or value.shape[0] == 1:
        return value
    pieces, at, taken = [], tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    tail = tf.shape(value, tf.int64)[1:]
    for start, length in zip(rows.starts, rows.lengths):
        pieces += [_ones(start - at, tail, value.dtype), value[taken : taken + length]]
        at, taken = start + length, taken + length
    return tf.concat([*pieces, _ones(rows.total - at, tail, value.dtype)], 0)


def _ones(rows: tf.Tensor, tail: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.ones(tf.concat([[tf.maximum(rows, 0)], tail], 0), dtype)


def _is_symbolic(tensor: Any) -> bool:
    return tf.is_tensor(tensor) and not hasattr(tensor, "numpy")


def _measured(shape: tf.Tensor) -> Any:
    """Returns the tensor whose first dimension a shape begins with, as far as the graph shows it; else None."""
    tensor = shape
    while _is_symbolic(tensor) and tensor.op.type in ("Cast", "Identity", "Pack", "ConcatV2", "StridedSlice", "Shape"):
        if tensor.op.type == "StridedSlice" and _constant(tensor.op.inputs[1]) != [0]:
            return None
        if tensor.op.type == "Shape":
            return tensor.op.inputs[0]
        tensor = tensor.op.inputs[0]
    return None


def _concatenated(source: Any, rows: int | None) -> list[tf.Tensor] | None:
    """Returns the parts of the nearest concatenation of rows that `source` is computed from; None if there is none.

    Args:
        rows: this rank's, if the number is known now; else the parts' first dimensions are unknown, too.
    """
    if not _is_symbolic(source):
        return None
    without = _plain.setdefault(source.graph, set())
    pending, seen = collections.deque([source.op]), set()
    while pending:
        op = pending.popleft()
        if op.name in seen or op.name in without:
            continue
        seen.add(op.name)
        if op.type == "ConcatV2" and len(op.inputs) > 2 and _constant(op.inputs[-1]) == 0:
            parts = list(op.inputs)[:-1]
            leads = [each.shape[0] if each.shape.rank else None for each in parts]
            if all(each is None if rows is None else each is not None and each % rows == 0 for each in leads):
                return parts
        pending.extend(each.op for each in op.inputs if _may_have_rows(each))
    without |= seen
    return None


def _may_have_rows(tensor: tf.Tensor) -> bool:
    # Shapes and other vectors of numbers about tensors are concatenated, too.
    return tensor.dtype not in (tf.resource, tf.variant) and (tensor.shape.rank is None or tensor.shape.rank > 1)


def _follows_from(source: tf.Tensor, batch: Any) -> bool:
    """Whether a tensor of a graph is computed from a tensor of the batch."""
    leaves = [each for each in tf.nest.flatten(batch, expand_composites=True) if _is_symbolic(each)]
    wanted = {each.op.name for each in leaves if each.graph is source.graph}
    pending, seen = [source.op], set()
    while pending:
        op = pending.pop()
        if op.name in wanted:
            return True
        if op.name not in seen:
            seen.add(op.name)
            pending += [each.op for each in op.inputs]
    return False


def _constant(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    return None if value is None else value.tolist()
