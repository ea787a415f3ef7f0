"""Knowledge of shapes before a step runs: integers computed from extents, and extents computed from integers.

placement_table.txt has the extents of other results, and the cases with operands of unknown rank.
"""

from __future__ import annotations

from typing import Any

import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Program
from keras_ddl.cut.analysis.dims import Dim, if_certain
from keras_ddl.cut.analysis.extents import Extents

raw = tf.raw_ops


def unranked(tensor: Any) -> Any:
    """Returns the tensor with its rank hidden from tracing."""
    return raw.PlaceholderWithDefault(input=tensor, shape=None)


def list_of(values: Any) -> Any:
    return raw.TensorListFromTensor(tensor=values, element_shape=[-1, 3])


def empty(shape: Any) -> Any:
    return raw.EmptyTensorList(element_shape=shape, max_num_elements=-1, element_dtype=tf.float64)


def item(values: Any, shape: Any) -> Any:
    return raw.TensorListGetItem(input_handle=values, index=0, element_shape=shape, element_dtype=tf.float64)


def sparse_product(x: Any, s: Any, b: Any, **more: Any) -> Any:
    shape, values = tf.cast(s, tf.int64), x[:2, 0]
    return raw.SparseTensorDenseMatMul(a_indices=_places(), a_values=values, a_shape=shape, b=b, **more)


def gradient_of_images(s: Any) -> Any:
    return raw.Conv2DBackpropInput(
        input_sizes=tf.concat([s[:1], [4, 4, 3]], 0), filter=tf.zeros([2, 2, 3, 5]),
        out_backprop=tf.zeros([s[0], 4, 4, 5]), strides=[1, 1, 1, 1], padding="SAME",
    )  # fmt: skip


def _places() -> Any:
    return tf.zeros([2, 2], tf.int64)


# Expressions of x [rows, 3], its shape s, and ids [rows] that give integer tensors, and their entries.
NUMBERS = [
    ("s", "[rows, 3]"),
    ("s[0]", "rows"),
    ("s[1]", "3"),
    ("s[-1]", "3"),
    ("s[:1]", "[rows]"),
    ("s[1:]", "[3]"),
    ("s[::-1]", "[3, rows]"),
    ("s[::2]", "[rows]"),
    ("s[1:1]", "[]"),
    ("s[:, None]", "unknown"),
    ("s[..., 0]", "?"),
    ("s * 2", "[2*rows, 6]"),
    ("s[0] * s[1]", "3*rows"),
    ("s[0] * s[0]", "rows*rows"),
    ("s * s[:1]", "[rows*rows, 3*rows]"),
    ("s + 1", "[sum(1, rows), 4]"),
    ("s[0] + 1 - 1", "rows"),
    ("s[0] - 1", "sum(-1, rows)"),
    ("s[0] - s[0]", "0"),
    ("s - s", "[0, 0]"),
    ("s[0] * 2 - s[0]", "rows"),
    ("s * 6 // 3", "[2*rows, 6]"),
    ("s[0] // 2", "quotient(rows, 2)"),
    ("s // s", "[1, 1]"),
    ("s // 0", "[?, ?]"),
    ("s[1] % 2", "1"),
    ("s[0] % 2", "?"),
    ("s[1] % 0", "?"),
    ("tf.maximum(s, 2)", "[larger(2, rows), 3]"),
    ("tf.maximum(s[1], 5)", "5"),
    ("tf.minimum(s, 2)", "[smaller(2, rows), 2]"),
    ("tf.minimum(s[1], 5)", "3"),
    ("tf.maximum(s[0], s[0])", "rows"),
    ("s * 2**20 * 2**20", "[?, ?]"),
    ("tf.cast(s, tf.int64) * 2**20 * 2**20", "[1099511627776*rows, 3298534883328]"),
    ("tf.cast(s, tf.int64)", "[rows, 3]"),
    ("tf.cast(tf.cast(s[0], tf.float32), tf.int32)", "?"),
    ("tf.concat([[2], s], 0)", "[2, rows, 3]"),
    ("tf.stack([s[0], 4])", "[rows, 4]"),
    ("tf.stack([s, s])[0]", "[?, ?]"),
    ("tf.unstack(s)[1]", "3"),
    ("tf.reduce_prod(s)", "3*rows"),
    ("tf.reduce_prod(s, 0, keepdims=True)", "[3*rows]"),
    ("tf.reduce_prod(s[:, None], 1)", "[?, ?]"),
    ("tf.reduce_sum(s)", "?"),
    ("tf.size(x)", "3*rows"),
    ("tf.rank(x)", "2"),
    ("tf.reshape(s[0], [1])", "[rows]"),
    ("tf.reshape(s, [2])", "[rows, 3]"),
    ("tf.reshape(s[:1], [])", "rows"),
    ("tf.reshape([[1, 2], [3, 4]], [4])", "[1, 2, 3, 4]"),
    ("tf.reshape(tf.zeros([6, 6], tf.int32), [36])", "unknown"),
    ("tf.zeros([33], tf.int32)", "unknown"),
    ("tf.zeros([32], tf.int32)", str([0] * 32)),
    ("tf.squeeze(s[:1])", "rows"),
    ("tf.expand_dims(s[0], 0)", "[rows]"),
    ("raw.EnsureShape(input=s, shape=[2])", "[rows, 3]"),
    ("tf.fill([2], s[0])", "[rows, rows]"),
    ("tf.fill(s[1:], 5)", "[5, 5, 5]"),
    ("tf.fill([33], s[0])", "unknown"),
    ("tf.fill([2, 2], s[0])", "unknown"),
    ("tf.fill(s[:1], 5)", "unknown"),
    ("tf.range(s[1])", "[0, 1, 2]"),
    ("tf.range(5, 1, -2)", "[5, 3]"),
    ("tf.range(s[0])", "unknown"),
    ("tf.range(40)", "unknown"),
    ("raw.Range(start=0, limit=s[1] + 29, delta=1)[-1]", "31"),
    ("raw.Range(start=0, limit=s[1] + 30, delta=1)[-1]", "?"),
    ("tf.gather(s, [1, 0])", "[3, rows]"),
    ("tf.gather(s, 1)", "3"),
    ("tf.gather(s, s[1] - 2)", "3"),
    ("tf.gather(s, s[0])", "?"),
    ("tf.gather(s, [-1])", "[?]"),
    ("raw.BroadcastArgs(s0=s, s1=[3])", "[rows, 3]"),
    ("raw.BroadcastArgs(s0=s, s1=[4, 1, 1])", "[4, rows, 3]"),
    ("raw.BroadcastArgs(s0=s, s1=[5, 3])", "[5, 3]"),
    ("raw.BroadcastArgs(s0=s, s1=s + 1)", "[?, ?]"),
    ("raw.DynamicStitch(indices=[[1], [0]], data=[s[:1], [5]])", "[5, rows]"),
    ("raw.DynamicStitch(indices=[[0, 1], [1]], data=[s, [5]])", "[rows, 5]"),
    ("raw.DynamicStitch(indices=[[0, 2], [1]], data=[s, [5]])", "[rows, 5, 3]"),
    ("raw.DynamicStitch(indices=[[0, 2], [3]], data=[s, [5]])", "[?, ?, ?, ?]"),
    ("raw.DynamicStitch(indices=[1, 0], data=[s[0], s[1]])", "[3, rows]"),
    ("raw.ConcatOffset(concat_dim=0, shape=[s, s, s])[2]", "[2*rows, 0]"),
    ("raw.ConcatOffset(concat_dim=1, shape=[s, s, s])[1]", "[0, 3]"),
    ("raw.ConcatOffset(concat_dim=2, shape=[s, s])[1]", "[?, ?]"),
    ("raw.ConcatOffset(concat_dim=0, shape=[s, s])[0]", "[0, 0]"),
    ("raw.InvertPermutation(x=[2, 0, 1])", "[1, 2, 0]"),
    ("raw.InvertPermutation(x=s * 0)", "[?, ?]"),
    ("tf.slice(s, [0], [-1])", "[rows, 3]"),
    ("tf.slice(s, s[1:] - 2, [1])", "[3]"),
    ("tf.slice(s, s[:1], [1])", "[?]"),
    ("tf.raw_ops.IdentityN(input=[s, s[0]])[1]", "rows"),
    ("tf.raw_ops.ShapeN(input=[x, x[:, :2]])[1]", "[?, 2]"),
    ('tf.shape(tf.ragged.constant([["a"]]).to_tensor())', "[1, ?]"),
    ('raw.StringSplitV2(input=tf.strings.as_string(ids), sep=" ")[2]', "[rows, ?]"),
    (
        "raw.RaggedTensorToSparse(rt_nested_splits=[tf.cast(ids, tf.int64)], rt_dense_values=x[:, 0])[2]",
        "[sum(-1, rows), ?]",
    ),
    ("tf.where(ids > 0)[:, 0]", "unknown"),
    ("ids", "unknown"),
    ("x[0]", "unknown"),
    ("tf.reshape(unranked(s), [2])", "[?, ?]"),
    ("s * unranked(s)", "unknown"),
    ("tf.slice(s, [1], [0])", "[]"),
    ("s[-1:]", "[3]"),
    ("s[::-2]", "[3]"),
    ("s[1::-1]", "[3, rows]"),
    ("tf.gather(tf.concat([s, s], 0), [3, 2, 0])", "[3, rows, rows]"),
    ("tf.concat([s, s, s], 0)[1:5:2]", "[3, 3]"),
    ("tf.concat([s, s], 0)[-3:-1]", "[3, rows]"),
    ("tf.concat([s, s], 0)[3:0:-1]", "[3, rows, 3]"),
    ("tf.slice(tf.concat([s, s], 0), [1], [2])", "[3, rows]"),
]
# Expressions and the extents of their tensors; "?" stands for an extent that only the tensor knows.
EXTENTS = [
    ("x", "[rows, 3]"),
    ("x[:1] + x", "[?, 3]"),
    ("x[:, :1] * x", "[?, 3]"),
    ("x + tf.zeros(s, tf.float64)", "[rows, 3]"),
    ("x[: s[0] - 1] + x", "[?, 3]"),
    ("tf.reshape(x, [-1])", "[3*rows]"),
    ("tf.reshape(x, [s[0] * 3])", "[3*rows]"),
    ("tf.reshape(x, [3, -1])", "[3, rows]"),
    ("tf.reshape(x, [-1, 2])", "[?, 2]"),
    ("tf.reshape(x, [s[0], -1, 1])", "[rows, 3, 1]"),
    ("tf.reshape(x, ids[:2])", "unknown"),
    ("tf.reshape(x, tf.concat([s, [1]], 0))", "[rows, 3, 1]"),
    ("tf.fill([s[0] - 1], 0.5)", "[sum(-1, rows)]"),
    ("tf.fill(ids[:2], 0.5)", "unknown"),
    ("tf.range(s[0])", "[rows]"),
    ("tf.range(0, s[0] - 1, 1)", "[?]"),
    ("tf.range(1, s[0], 1)", "[?]"),
    ("tf.range(0, s[0], 2)", "[?]"),
    ("tf.range(0.0, 5.0, 1.0)", "[5]"),
    ("tf.concat([x, x[1:]], 0)", "[?, 3]"),
    ("tf.tile(x, [1, s[0]])", "[rows, 3*rows]"),
    ("tf.broadcast_to(x, [2, s[0], 3])", "[2, rows, 3]"),
    ("tf.broadcast_to(ids[:1], s[:1])", "[rows]"),
    ("tf.one_hot(ids, s[0])", "[rows, rows]"),
    ("tf.gather_nd(x, ids[:, None])", "[?, 3]"),
    ("tf.gather_nd(x, tf.zeros([5, 2], tf.int32))", "[5]"),
    ("tf.math.top_k(x, s[1])[1]", "[rows, 3]"),
    ("tf.squeeze(x[:, :1], 1)", "[?]"),
    ("tf.squeeze(x[:, None])", "unknown"),
    ("tf.pad(x, [[0, 0], [1, 2]])", "[rows, 6]"),
    ("raw.UnsortedSegmentMax(data=x, segment_ids=ids, num_segments=s[0])", "[rows, 3]"),
    ("tf.scatter_nd(ids[:, None], x, s)", "[rows, 3]"),
    ("tf.scatter_nd(ids[:, None], x, s - 1)", "[?, 2]"),
    ("item(list_of(tf.expand_dims(x, 0)), [-1, 3])", "[rows, 3]"),
    ("item(list_of(raw.PlaceholderWithDefault(input=[x], shape=[1, None, 3])), s)", "[rows, 3]"),
    ("item(empty([-1, 3]), s)", "[rows, 3]"),
    ("item(empty([-1, 3]), [-1, 3])", "[?, 3]"),
    ("raw.SparseToDense(sparse_indices=ids, output_shape=s[:1], sparse_values=x[:, 0], default_value=zero)", "[rows]"),
    ("sparse_product(x, s, tf.zeros([3, 5], tf.float64))", "[rows, 5]"),
    ("sparse_product(x, s, x, adjoint_a=True)", "[3, 3]"),
    ("raw.SparseSegmentSumWithNumSegments(data=x, indices=ids, segment_ids=ids, num_segments=s[0])", "[rows, 3]"),
    ("raw.SparseSegmentMeanWithNumSegments(data=x, indices=ids, segment_ids=ids, num_segments=5)", "[5, 3]"),
    ("raw.SparseFillEmptyRows(indices=places, values=x[:2, 0], dense_shape=long, default_value=zero)[2]", "[rows]"),
    ("tf.RaggedTensor.from_row_lengths(ids, ids).to_tensor()", "[rows, ?]"),
    ("tf.RaggedTensor.from_row_splits(x, ids).to_tensor()", "[?, ?, 3]"),
    ("tf.RaggedTensor.from_row_splits(x, ids).to_tensor(shape=[None, 4, 3])", "[?, 4, 3]"),
    ("tf.RaggedTensor.from_value_rowids(x, ids, nrows=s[0]).to_tensor()", "[rows, ?, 3]"),
    ("tf.strings.lower(tf.strings.as_string(ids))", "[rows]"),
    ("tf.image.resize(tf.zeros([s[0], 4, 4, 3]), [2, 5])", "[rows, 2, 5, 3]"),
    ("gradient_of_images(s)", "[rows, 4, 4, 3]"),
    ("x[:2]", "[?, 3]"),
    ("x[:, 1]", "[?]"),
    ("tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2.0), (0, x))[1]", "[?, 3]"),
    ("tf.cond(s[0] > 2, lambda: x, lambda: x * 2.0)", "[?, 3]"),
    ("unranked(x)", "unknown"),
    ("tf.gather_nd(x, raw.PlaceholderWithDefault(input=ids[:, None], shape=[None, None]))", "unknown"),
]


def _known(expression: str) -> tuple[Extents, Any]:
    graph = tf.__internal__.FuncGraph("step")
    with graph.as_default():
        x, ids = tf.compat.v1.placeholder(tf.float64, [None, 3]), tf.compat.v1.placeholder(tf.int32, [None])
        names = {"x": x, "s": tf.shape(x), "ids": ids, "long": tf.shape(x, tf.int64)}
        names |= {"zero": tf.constant(0.0, tf.float64), "places": _places()}
        graph.outputs = [eval(expression, {**globals(), **names})]
        graph.inputs = [x, ids]
    program, rows = Program(graph), Dim.unknown("rows")
    known = Extents(rows)
    for value, dims in zip(program.inputs, ((rows, Dim(3)), (rows,))):
        known.set_dims(value, dims)
    return known, program.outputs[0]


def _words(entries: Any) -> str:
    named = ("entry(", "extent(", "size(")
    return ", ".join("?" if any(name in str(each) for name in named) else str(each) for each in entries)


@pytest.mark.parametrize(("expression", "expected"), NUMBERS, ids=map(str, range(len(NUMBERS))))
def test_integers_of_shapes_are_known(expression: str, expected: str) -> None:
    known, value = _known(expression)
    numbers = if_certain(known.numbers, value)
    found = "unknown" if numbers is None else _words(numbers) if value.rank == 0 else f"[{_words(numbers)}]"
    assert found == expected


@pytest.mark.parametrize(("expression", "expected"), EXTENTS, ids=map(str, range(len(EXTENTS))))
def test_extents_are_known(expression: str, expected: str) -> None:
    known, value = _known(expression)
    dims = if_certain(known.dims, value)
    assert ("unknown" if dims is None else f"[{_words(dims)}]") == expected
