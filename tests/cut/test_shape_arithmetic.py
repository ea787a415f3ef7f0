"""What the cut knows of shapes before a step runs: integers that are computed from extents, and extents from integers.

The extents of other results, and what becomes of operands whose rank is open, are in placement_table.txt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Program
from keras_ddl.cut.dims import Dim, if_certain
from keras_ddl.cut.extents import Extents

raw = tf.raw_ops


def unranked(tensor: Any) -> Any:
    """Returns a tensor of whose rank tracing sees nothing."""
    return raw.PlaceholderWithDefault(input=tensor, shape=None)


def _list_of(values: Any) -> Any:
    return raw.TensorListFromTensor(tensor=values, element_shape=[-1, 3])


def _empty(shape: Any) -> Any:
    return raw.EmptyTensorList(element_shape=shape, max_num_elements=-1, element_dtype=tf.float64)


def _item(values: Any, shape: Any) -> Any:
    return raw.TensorListGetItem(input_handle=values, index=0, element_shape=shape, element_dtype=tf.float64)


# Of x [rows, 3], its shape s and ids [rows]: an integer tensor, and its entries.
NUMBERS: list[tuple[Callable[[Any, Any, Any], Any], str]] = [
    (lambda x, s, ids: s, "[rows, 3]"),
    (lambda x, s, ids: s[0], "rows"),
    (lambda x, s, ids: s[1], "3"),
    (lambda x, s, ids: s[-1], "3"),
    (lambda x, s, ids: s[-2], "rows"),
    (lambda x, s, ids: s[:1], "[rows]"),
    (lambda x, s, ids: s[1:], "[3]"),
    (lambda x, s, ids: s[:-1], "[rows]"),
    (lambda x, s, ids: s[::-1], "[3, rows]"),
    (lambda x, s, ids: s[::2], "[rows]"),
    (lambda x, s, ids: s[0:2:1], "[rows, 3]"),
    (lambda x, s, ids: s[1:1], "[]"),
    (lambda x, s, ids: s[:, None], "unknown"),
    (lambda x, s, ids: s[..., 0], "?"),
    (lambda x, s, ids: s * 2, "[2*rows, 6]"),
    (lambda x, s, ids: 2 * s[0], "2*rows"),
    (lambda x, s, ids: s[0] * s[1], "3*rows"),
    (lambda x, s, ids: s[0] * s[0], "rows*rows"),
    (lambda x, s, ids: s * [2, 5], "[2*rows, 15]"),
    (lambda x, s, ids: s * s[:1], "[rows*rows, 3*rows]"),
    (lambda x, s, ids: s[:1] * s, "[rows*rows, 3*rows]"),
    (lambda x, s, ids: s + 1, "[sum(1, rows), 4]"),
    (lambda x, s, ids: s[0] + 1 - 1, "rows"),
    (lambda x, s, ids: s[0] - 1, "sum(-1, rows)"),
    (lambda x, s, ids: s[0] - s[0], "0"),
    (lambda x, s, ids: s - s, "[0, 0]"),
    (lambda x, s, ids: s[0] * 2 - s[0], "rows"),
    (lambda x, s, ids: s * 6 // 3, "[2*rows, 6]"),
    (lambda x, s, ids: s[0] // 2, "quotient(rows, 2)"),
    (lambda x, s, ids: s // s, "[1, 1]"),
    (lambda x, s, ids: s // 0, "[?, ?]"),
    (lambda x, s, ids: s[1] // 2, "1"),
    (lambda x, s, ids: s[1] % 2, "1"),
    (lambda x, s, ids: s[0] % 2, "?"),
    (lambda x, s, ids: s[1] % 0, "?"),
    (lambda x, s, ids: tf.maximum(s, 2), "[larger(2, rows), 3]"),
    (lambda x, s, ids: tf.maximum(s[1], 5), "5"),
    (lambda x, s, ids: tf.minimum(s, 2), "[smaller(2, rows), 2]"),
    (lambda x, s, ids: tf.minimum(s[1], 5), "3"),
    (lambda x, s, ids: tf.maximum(s[0], s[0]), "rows"),
    (lambda x, s, ids: s * 2**20 * 2**20, "[?, ?]"),
    (lambda x, s, ids: tf.cast(s, tf.int64) * 2**20 * 2**20, "[1099511627776*rows, 3298534883328]"),
    (lambda x, s, ids: tf.cast(s, tf.int64), "[rows, 3]"),
    (lambda x, s, ids: tf.cast(tf.cast(s[0], tf.float32), tf.int32), "?"),
    (lambda x, s, ids: tf.concat([[2], s], 0), "[2, rows, 3]"),
    (lambda x, s, ids: tf.concat([s, s[1:], [7]], 0), "[rows, 3, 3, 7]"),
    (lambda x, s, ids: tf.stack([s[0], 4]), "[rows, 4]"),
    (lambda x, s, ids: tf.stack([s, s])[0], "[?, ?]"),
    (lambda x, s, ids: tf.unstack(s)[1], "3"),
    (lambda x, s, ids: tf.reduce_prod(s), "3*rows"),
    (lambda x, s, ids: tf.reduce_prod(s[1:]), "3"),
    (lambda x, s, ids: tf.reduce_prod(s, 0, keepdims=True), "[3*rows]"),
    (lambda x, s, ids: tf.reduce_prod(s[:, None], 1), "[?, ?]"),
    (lambda x, s, ids: tf.reduce_prod(s, -1), "3*rows"),
    (lambda x, s, ids: tf.reduce_sum(s), "?"),
    (lambda x, s, ids: tf.size(x), "3*rows"),
    (lambda x, s, ids: tf.size(ids), "rows"),
    (lambda x, s, ids: tf.rank(x), "2"),
    (lambda x, s, ids: tf.reshape(s[0], [1]), "[rows]"),
    (lambda x, s, ids: tf.reshape(s, [2]), "[rows, 3]"),
    (lambda x, s, ids: tf.reshape(s[:1], []), "rows"),
    (lambda x, s, ids: tf.reshape([[1, 2], [3, 4]], [4]), "[1, 2, 3, 4]"),
    (lambda x, s, ids: tf.reshape(tf.zeros([6, 6], tf.int32), [36]), "unknown"),
    (lambda x, s, ids: tf.zeros([33], tf.int32), "unknown"),
    (
        lambda x, s, ids: tf.zeros([32], tf.int32),
        "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]",
    ),
    (lambda x, s, ids: tf.squeeze(s[:1]), "rows"),
    (lambda x, s, ids: tf.expand_dims(s[0], 0), "[rows]"),
    (lambda x, s, ids: raw.EnsureShape(input=s, shape=[2]), "[rows, 3]"),
    (lambda x, s, ids: tf.fill([2], s[0]), "[rows, rows]"),
    (lambda x, s, ids: tf.fill(s[1:], 5), "[5, 5, 5]"),
    (lambda x, s, ids: tf.fill([33], s[0]), "unknown"),
    (lambda x, s, ids: tf.fill([2, 2], s[0]), "unknown"),
    (lambda x, s, ids: tf.fill(s[:1], 5), "unknown"),
    (lambda x, s, ids: tf.range(s[1]), "[0, 1, 2]"),
    (lambda x, s, ids: tf.range(1, 7, 2), "[1, 3, 5]"),
    (lambda x, s, ids: tf.range(5, 1, -2), "[5, 3]"),
    (lambda x, s, ids: tf.range(s[0]), "unknown"),
    (lambda x, s, ids: tf.range(40), "unknown"),
    (lambda x, s, ids: raw.Range(start=0, limit=s[1] + 29, delta=1)[-1], "31"),
    (lambda x, s, ids: raw.Range(start=0, limit=s[1] + 30, delta=1)[-1], "?"),
    (lambda x, s, ids: tf.gather(s, [1, 0]), "[3, rows]"),
    (lambda x, s, ids: tf.gather(s, 1), "3"),
    (lambda x, s, ids: tf.gather(s, s[1] - 2), "3"),
    (lambda x, s, ids: tf.gather(s, [s[1]]), "[?]"),
    (lambda x, s, ids: tf.gather(s, s[0]), "?"),
    (lambda x, s, ids: tf.gather(s, [-1]), "[?]"),
    (lambda x, s, ids: tf.gather(s[0:1], 0), "rows"),
    (lambda x, s, ids: raw.BroadcastArgs(s0=s, s1=[3]), "[rows, 3]"),
    (lambda x, s, ids: raw.BroadcastArgs(s0=s, s1=[4, 1, 1]), "[4, rows, 3]"),
    (lambda x, s, ids: raw.BroadcastArgs(s0=s, s1=[1, 3]), "[rows, 3]"),
    (lambda x, s, ids: raw.BroadcastArgs(s0=s, s1=[5, 3]), "[5, 3]"),
    (lambda x, s, ids: raw.BroadcastArgs(s0=s, s1=s + 1), "[?, ?]"),
    (lambda x, s, ids: raw.DynamicStitch(indices=[[1], [0]], data=[s[:1], [5]]), "[5, rows]"),
    (lambda x, s, ids: raw.DynamicStitch(indices=[[0, 1], [1]], data=[s, [5]]), "[rows, 5]"),
    (lambda x, s, ids: raw.DynamicStitch(indices=[[0, 2], [1]], data=[s, [5]]), "[rows, 5, 3]"),
    (lambda x, s, ids: raw.DynamicStitch(indices=[[0, 2], [3]], data=[s, [5]]), "[?, ?, ?, ?]"),
    (lambda x, s, ids: raw.DynamicStitch(indices=[1, 0], data=[s[0], s[1]]), "[3, rows]"),
    (lambda x, s, ids: raw.ConcatOffset(concat_dim=0, shape=[s, s, s])[2], "[2*rows, 0]"),
    (lambda x, s, ids: raw.ConcatOffset(concat_dim=1, shape=[s, s, s])[2], "[0, 6]"),
    (lambda x, s, ids: raw.ConcatOffset(concat_dim=1, shape=[s, s, s])[1], "[0, 3]"),
    (lambda x, s, ids: raw.ConcatOffset(concat_dim=2, shape=[s, s])[1], "[?, ?]"),
    (lambda x, s, ids: raw.ConcatOffset(concat_dim=0, shape=[s, s])[0], "[0, 0]"),
    (lambda x, s, ids: raw.InvertPermutation(x=[2, 0, 1]), "[1, 2, 0]"),
    (lambda x, s, ids: raw.InvertPermutation(x=s * 0), "[?, ?]"),
    (lambda x, s, ids: raw.InvertPermutation(x=s), "[?, ?]"),
    (lambda x, s, ids: tf.slice(s, [1], [1]), "[3]"),
    (lambda x, s, ids: tf.slice(s, [0], [-1]), "[rows, 3]"),
    (lambda x, s, ids: tf.slice(s, [1], [-1]), "[3]"),
    (lambda x, s, ids: tf.slice(s, s[1:] - 2, [1]), "[3]"),
    (lambda x, s, ids: tf.slice(s, s[:1], [1]), "[?]"),
    (lambda x, s, ids: tf.identity(s), "[rows, 3]"),
    (lambda x, s, ids: tf.raw_ops.IdentityN(input=[s, s[0]])[1], "rows"),
    (lambda x, s, ids: tf.raw_ops.ShapeN(input=[x, x[:, :2]])[1], "[?, 2]"),
    (lambda x, s, ids: tf.shape(tf.ragged.constant([["a"]]).to_tensor()), "[1, ?]"),
    (lambda x, s, ids: raw.StringSplitV2(input=tf.strings.as_string(ids), sep=" ")[2], "[rows, ?]"),
    (lambda x, s, ids: tf.RaggedTensor.from_row_splits(ids, [0, 2, 5]).to_sparse().dense_shape, "[2, ?]"),
    (
        lambda x, s, ids: raw.RaggedTensorToSparse(rt_nested_splits=[tf.cast(ids, tf.int64)], rt_dense_values=x[:, 0])[
            2
        ],
        "[sum(-1, rows), ?]",
    ),
    (lambda x, s, ids: tf.where(ids > 0)[:, 0], "unknown"),
    (lambda x, s, ids: ids, "unknown"),
    (lambda x, s, ids: tf.cast(x[:, 0], tf.int32), "unknown"),
    (lambda x, s, ids: x[0], "unknown"),
    (lambda x, s, ids: tf.shape(unranked(x)), "unknown"),
    (lambda x, s, ids: tf.reshape(unranked(s), [2]), "[?, ?]"),
    (lambda x, s, ids: s * unranked(s), "unknown"),
    (lambda x, s, ids: tf.slice(s, [1], [0]), "[]"),
    (lambda x, s, ids: s[1:2], "[3]"),
    (lambda x, s, ids: s[-1:], "[3]"),
    (lambda x, s, ids: s[::-2], "[3]"),
    (lambda x, s, ids: s[1::-1], "[3, rows]"),
    (lambda x, s, ids: tf.gather(tf.concat([s, s], 0), [3, 2, 0]), "[3, rows, rows]"),
    (lambda x, s, ids: tf.concat([s, s], 0)[2:], "[rows, 3]"),
    (lambda x, s, ids: tf.concat([s, s, s], 0)[1:5:2], "[3, 3]"),
    (lambda x, s, ids: tf.concat([s, s], 0)[-3:-1], "[3, rows]"),
    (lambda x, s, ids: tf.concat([s, s], 0)[3:0:-1], "[3, rows, 3]"),
    (lambda x, s, ids: tf.slice(tf.concat([s, s], 0), [1], [2]), "[3, rows]"),
]
# A tensor, and its extents. "?" is one that only the tensor tells.
EXTENTS: list[tuple[Callable[[Any, Any, Any], Any], str]] = [
    (lambda x, s, ids: x, "[rows, 3]"),
    (lambda x, s, ids: x[:1] + x, "[?, 3]"),
    (lambda x, s, ids: x * tf.ones([3], tf.float64), "[rows, 3]"),
    (lambda x, s, ids: x[:, :1] * x, "[?, 3]"),
    (lambda x, s, ids: x + tf.zeros(s, tf.float64), "[rows, 3]"),
    (lambda x, s, ids: x[: s[0] - 1] + x, "[?, 3]"),
    (lambda x, s, ids: tf.reshape(x, [-1]), "[3*rows]"),
    (lambda x, s, ids: tf.reshape(x, [s[0] * 3]), "[3*rows]"),
    (lambda x, s, ids: tf.reshape(x, [3, -1]), "[3, rows]"),
    (lambda x, s, ids: tf.reshape(x, [-1, 2]), "[?, 2]"),
    (lambda x, s, ids: tf.reshape(x, [-1, s[1]]), "[rows, 3]"),
    (lambda x, s, ids: tf.reshape(x, [s[0], -1, 1]), "[rows, 3, 1]"),
    (lambda x, s, ids: tf.reshape(x, ids[:2]), "unknown"),
    (lambda x, s, ids: tf.reshape(x, tf.concat([s, [1]], 0)), "[rows, 3, 1]"),
    (lambda x, s, ids: tf.fill([s[0] - 1], 0.5), "[sum(-1, rows)]"),
    (lambda x, s, ids: tf.fill(ids[:2], 0.5), "unknown"),
    (lambda x, s, ids: tf.range(s[0]), "[rows]"),
    (lambda x, s, ids: tf.range(0, s[0], 1), "[rows]"),
    (lambda x, s, ids: tf.range(0, s[0] - 1, 1), "[?]"),
    (lambda x, s, ids: tf.range(1, s[0], 1), "[?]"),
    (lambda x, s, ids: tf.range(0, s[0], 2), "[?]"),
    (lambda x, s, ids: tf.range(0.0, 5.0, 1.0), "[5]"),
    (lambda x, s, ids: tf.concat([x, x[1:]], 0), "[?, 3]"),
    (lambda x, s, ids: tf.tile(x, [2, 1]), "[2*rows, 3]"),
    (lambda x, s, ids: tf.tile(x, [1, s[0]]), "[rows, 3*rows]"),
    (lambda x, s, ids: tf.broadcast_to(x, [2, s[0], 3]), "[2, rows, 3]"),
    (lambda x, s, ids: tf.broadcast_to(ids[:1], s[:1]), "[rows]"),
    (lambda x, s, ids: tf.one_hot(ids, s[0]), "[rows, rows]"),
    (lambda x, s, ids: tf.gather_nd(x, ids[:, None]), "[?, 3]"),
    (lambda x, s, ids: tf.gather_nd(x, tf.zeros([5, 2], tf.int32)), "[5]"),
    (lambda x, s, ids: tf.math.top_k(x, 2)[0], "[rows, 2]"),
    (lambda x, s, ids: tf.math.top_k(x, s[1])[1], "[rows, 3]"),
    (lambda x, s, ids: tf.matmul(x[:, None], x[:, :, None]), "[?, 1, 1]"),
    (lambda x, s, ids: tf.squeeze(x[:, :1], 1), "[?]"),
    (lambda x, s, ids: tf.squeeze(x[:, None]), "unknown"),
    (lambda x, s, ids: tf.pad(x, [[0, 0], [1, 2]]), "[rows, 6]"),
    (lambda x, s, ids: raw.UnsortedSegmentMax(data=x, segment_ids=ids, num_segments=s[0]), "[rows, 3]"),
    (lambda x, s, ids: tf.scatter_nd(ids[:, None], x, s), "[rows, 3]"),
    (lambda x, s, ids: tf.scatter_nd(ids[:, None], x, [7, 3]), "[7, 3]"),
    (lambda x, s, ids: tf.scatter_nd(ids[:, None], x, s - 1), "[?, 2]"),
    (lambda x, s, ids: _item(_list_of(tf.expand_dims(x, 0)), [-1, 3]), "[rows, 3]"),
    (lambda x, s, ids: _item(_list_of(raw.PlaceholderWithDefault(input=[x], shape=[1, None, 3])), s), "[rows, 3]"),
    (lambda x, s, ids: _item(_empty([-1, 3]), s), "[rows, 3]"),
    (lambda x, s, ids: _item(_empty([-1, 3]), [-1, 3]), "[?, 3]"),
    (
        lambda x, s, ids: raw.SparseToDense(
            sparse_indices=ids, output_shape=s[:1], sparse_values=x[:, 0], default_value=tf.constant(0.0, tf.float64)
        ),
        "[rows]",
    ),
    (
        lambda x, s, ids: raw.SparseTensorDenseMatMul(
            a_indices=tf.zeros([2, 2], tf.int64),
            a_values=x[:2, 0],
            a_shape=tf.cast(s, tf.int64),
            b=tf.zeros([3, 5], tf.float64),
        ),
        "[rows, 5]",
    ),
    (
        lambda x, s, ids: raw.SparseTensorDenseMatMul(
            a_indices=tf.zeros([2, 2], tf.int64), a_values=x[:2, 0], a_shape=tf.cast(s, tf.int64), b=x, adjoint_a=True
        ),
        "[3, 3]",
    ),
    (
        lambda x, s, ids: raw.SparseSegmentSumWithNumSegments(data=x, indices=ids, segment_ids=ids, num_segments=s[0]),
        "[rows, 3]",
    ),
    (
        lambda x, s, ids: raw.SparseSegmentMeanWithNumSegments(data=x, indices=ids, segment_ids=ids, num_segments=5),
        "[5, 3]",
    ),
    (
        lambda x, s, ids: raw.SparseFillEmptyRows(
            indices=tf.zeros([2, 2], tf.int64),
            values=x[:2, 0],
            dense_shape=tf.cast(s, tf.int64),
            default_value=tf.constant(0.0, tf.float64),
        )[2],
        "[rows]",
    ),
    (lambda x, s, ids: tf.RaggedTensor.from_row_lengths(ids, ids).to_tensor(), "[rows, ?]"),
    (lambda x, s, ids: tf.RaggedTensor.from_row_splits(x, ids).to_tensor(), "[?, ?, 3]"),
    (lambda x, s, ids: tf.RaggedTensor.from_row_splits(x, ids).to_tensor(shape=[None, 4, 3]), "[?, 4, 3]"),
    (lambda x, s, ids: tf.RaggedTensor.from_value_rowids(x, ids, nrows=s[0]).to_tensor(), "[rows, ?, 3]"),
    (lambda x, s, ids: tf.strings.split(tf.strings.as_string(ids)).to_tensor(), "[rows, ?]"),
    (lambda x, s, ids: tf.strings.lower(tf.strings.as_string(ids)), "[rows]"),
    (lambda x, s, ids: tf.image.resize(tf.zeros([s[0], 4, 4, 3]), [2, 5]), "[rows, 2, 5, 3]"),
    (
        lambda x, s, ids: raw.Conv2DBackpropInput(
            input_sizes=tf.concat([s[:1], [4, 4, 3]], 0),
            filter=tf.zeros([2, 2, 3, 5]),
            out_backprop=tf.zeros([s[0], 4, 4, 5]),
            strides=[1, 1, 1, 1],
            padding="SAME",
        ),
        "[rows, 4, 4, 3]",
    ),
    (lambda x, s, ids: x[:2], "[?, 3]"),
    (lambda x, s, ids: x[1:], "[?, 3]"),
    (lambda x, s, ids: x[:, 1], "[?]"),
    (lambda x, s, ids: tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2.0), (0, x))[1], "[?, 3]"),
    (lambda x, s, ids: tf.cond(s[0] > 2, lambda: x, lambda: x * 2.0), "[?, 3]"),
    (lambda x, s, ids: unranked(x), "unknown"),
    (
        lambda x, s, ids: tf.gather_nd(x, raw.PlaceholderWithDefault(input=ids[:, None], shape=[None, None])),
        "unknown",
    ),
    (lambda x, s, ids: tf.fill([s[0] - s[0]], 0.5), "[0]"),
]


def _known(function: Callable[[Any, Any, Any], Any]) -> tuple[Extents, Any]:
    graph = tf.__internal__.FuncGraph("step")
    with graph.as_default():
        x, ids = tf.compat.v1.placeholder(tf.float64, [None, 3]), tf.compat.v1.placeholder(tf.int32, [None])
        graph.outputs = [function(x, tf.shape(x), ids)]
        graph.inputs = [x, ids]
    program, rows = Program(graph), Dim.unknown("rows")
    known = Extents(rows)
    for value, dims in zip(program.inputs, ((rows, Dim(3)), (rows,))):
        known.set_dims(value, dims)
    return known, program.outputs[0]


def _words(entries: Any) -> str:
    return ", ".join("?" if "entry(" in str(each) or "extent(" in str(each) else str(each) for each in entries)


def numbers_of(function: Callable[[Any, Any, Any], Any]) -> str:
    known, value = _known(function)
    numbers = if_certain(known.numbers, value)
    if numbers is None:
        return "unknown"
    return _words(numbers) if value.rank == 0 else f"[{_words(numbers)}]"


def extents_of(function: Callable[[Any, Any, Any], Any]) -> str:
    known, value = _known(function)
    dims = if_certain(known.dims, value)
    return "unknown" if dims is None else f"[{_words(dims)}]"


@pytest.mark.parametrize(("function", "expected"), NUMBERS, ids=map(str, range(len(NUMBERS))))
def test_integers_of_shapes_are_known(function: Callable[[Any, Any, Any], Any], expected: str) -> None:
    assert numbers_of(function) == expected


@pytest.mark.parametrize(("function", "expected"), EXTENTS, ids=map(str, range(len(EXTENTS))))
def test_extents_are_known(function: Callable[[Any, Any, Any], Any], expected: str) -> None:
    assert extents_of(function) == expected
