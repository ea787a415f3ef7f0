"""One small program at least for each type of operation that has a rule, as a function of x [rows, 3] in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import registry
from keras_ddl.cut.rules import elementwise

raw = tf.raw_ops
CASES: dict[str, list[Callable[[Any], Any]]] = {}
# Rules of control flow (test_control_flow.py), of what hosts do and of tables in variables, tested by these names.
TESTED_ELSEWHERE = ("branches", "loops", "host", "tables")
# What the operand has to be like, where not any number will do.
_INTEGERS = {"Invert", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"}
_ANY_INTEGERS = {"Mod", "FloorMod", "FloorDiv", "TruncateDiv", "TruncateMod"}
_BOOLS = {"LogicalNot", "LogicalAnd", "LogicalOr"}
_POSITIVE = {
    "Log",
    "Sqrt",
    "Rsqrt",
    "Lgamma",
    "Digamma",
    "Acosh",
    "Igamma",
    "Igammac",
    "Zeta",
    "Pow",
    "Xlogy",
    "Xlog1py",
}
_SMALL = {"Erfinv", "Asin", "Acos", "Atanh", "Log1p", "Ndtri"}


def case(*types: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Says for which types a program stands; the test sees to it that it has them."""

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for each in types:
            CASES.setdefault(each, []).append(function)
        return function

    return register


def types_to_try() -> list[str]:
    """Returns the types of operations whose rules are tried here."""
    found = []
    for each in registry.types_with_rules():
        rules = [registry.rule_of(each), registry.rule_of(each, of_whole=True)]
        modules = {rule.__module__.rsplit(".", 1)[-1] for rule in rules if rule is not None}
        if not modules <= set(TESTED_ELSEWHERE):
            found.append(each)
    return found


def _operand(kind: str, x: Any) -> Any:
    if kind in _INTEGERS | _ANY_INTEGERS:
        return tf.cast(tf.abs(x) * 4, tf.int32) + 1
    if kind in _BOOLS:
        return x > 0
    if kind in _POSITIVE:
        return tf.abs(x) + 1.5
    return tf.tanh(x) * 0.4 + 0.5 if kind in _SMALL else x


def _call(kind: str, *operands: Any) -> Any:
    names = list(getattr(raw, kind).__signature__.parameters)
    more = {"DstT": tf.float32} if kind == "Cast" else {}
    return getattr(raw, kind)(**dict(zip(names, operands)), **more)


def _unary(kind: str) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        value = tf.cast(x, tf.complex128) if kind == "Conj" else _operand(kind, x)
        found = [_call(kind, value)]
        if kind not in _BOOLS and value.dtype.is_floating:
            # Of a sum over rows, an extreme, and a tensor whose batch is not axis 0.
            found += [_call(kind, _operand(kind, tf.reduce_sum(x, 0)))]
            found += [_call(kind, _operand(kind, tf.reduce_max(x, 0))), _call(kind, tf.transpose(value))]
        return [tf.math.real(each) if each.dtype.is_complex else each for each in found]

    return program


def _binary(kind: str) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        a, b = _operand(kind, x), _operand(kind, x[:, ::-1] * 0.7 + 0.1)
        if kind == "SelectV2":
            return [tf.where(x > 0, a, b), tf.where(x[:, :1] > 0, a, 1.0), tf.where(tf.reduce_sum(x) > 0, a, b)]
        if kind == "Polygamma":
            return tf.math.polygamma(tf.ones_like(x), tf.abs(x) + 1)
        if kind == "AddN":
            s = tf.reduce_sum(x, 0)
            return [tf.add_n([a, b, a]), tf.add_n([s, s * 2, s]), tf.add_n([s, tf.ones_like(s), tf.reduce_max(x, 0)])]
        if kind == "LeakyReluGrad" or kind.endswith("Grad"):
            return [_call(kind, a, b), _call(kind, tf.transpose(a), tf.transpose(b))]
        found = [_call(kind, a, b), _call(kind, a, a[:, :1]), _call(kind, tf.constant(_numbers(a)), b)]
        if kind not in _BOOLS:
            sums = [_operand(kind, tf.reduce_sum(x, 0)), _operand(kind, tf.reduce_max(x, 0)), tf.constant(_numbers(a))]
            found += [_call(kind, one, other) for one in sums for other in (*sums, a)]
        column = a[:, 0]
        return [*found, _call(kind, column[:, None], column), _call(kind, tf.transpose(a), b[:, 1])]

    return program


def _numbers(like: Any) -> np.ndarray:
    if like.dtype == tf.bool:
        return np.array([True, False, True])
    return np.array([1, 2, 3], like.dtype.as_numpy_dtype)


for _kind in elementwise.UNARY.split():
    case(_kind)(_unary(_kind))
for _kind in [*elementwise.BINARY.split(), "AddN"]:
    case(_kind)(_binary(_kind))


@case("Select")
def select(x: Any) -> Any:
    def of(condition: Any, first: Any, second: Any) -> Any:
        return raw.Select(condition=condition, x=first, y=second)

    s, other = tf.reduce_sum(x, 0), tf.transpose(x)
    both = tf.ones_like(x) * s, tf.ones_like(other)
    found = [
        of(x > 0, x, both[0]),
        of(x[:, 0] > 0, both[0], x),
        of(tf.reduce_sum(x) > 0, x, both[0]),
        of(s > 0, s, 2 * s),
    ]
    found += [of(other > 0, both[1], other), of([True, False, True], other, both[1]), of(x[:, 1] > 0, both[0], both[0])]
    with tf.GradientTape() as tape:
        tape.watch(x)
        errors = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(x > 0.5, x.dtype), logits=x)
    return [*found, errors, tape.gradient(errors, x)]


@case("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "Bitcast")
def passed_on(x: Any) -> Any:
    s = tf.reduce_sum(x, 0)
    many = raw.IdentityN(input=[x, s, tf.reduce_max(x, 0)])
    found = [tf.identity(x), tf.stop_gradient(s), raw.PreventGradient(input=x), raw.Snapshot(input=s), *many]
    with tf.control_dependencies([tf.print("", output_stream="file:///dev/null")]):
        found.append(tf.identity(x))
    return [*found, tf.bitcast(x, tf.int64), tf.bitcast(tf.cast(x, tf.float32), tf.uint8)]


@case("Mul", "RealDiv")
def counts_that_are_infinite(x: Any) -> Any:
    s, count = tf.reduce_sum(x, 0), tf.shape(x)[0] * 70000
    found = [s * tf.cast(tf.cast(count, tf.float16), tf.float64), s * tf.cast(count, tf.float64)]
    return [*found, s / tf.cast(count, tf.float64)]


@case("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "BiasAdd", "BiasAddGrad")
def products(x: Any) -> Any:
    w = tf.constant(np.arange(12.0).reshape(3, 4) - 5)
    inf = tf.constant([[np.inf, 1.0], [2.0, 3.0], [-1.0, 0.0]], tf.float64)
    cube = tf.reshape(tf.matmul(x, w), [-1, 2, 2])
    c = tf.complex(x, x * 2)
    gram = tf.matmul(x, x, transpose_a=True)
    found = [x @ w, tf.matmul(x, x, transpose_b=True), gram, gram @ w, gram @ inf, tf.matmul(x, gram, transpose_b=True)]
    found += [tf.matmul(w, gram, transpose_a=True), tf.matmul(gram, gram)]
    found += [raw.BatchMatMul(x=cube, y=cube, adj_x=True), tf.matmul(cube, cube, adjoint_b=True)]
    found += [tf.matmul(cube, w[:2, :2]), tf.matmul(w[:1, :2][None], cube), tf.matmul(cube, gram[None, :2, :2])]
    found += [raw.BatchMatMulV3(x=cube, y=cube, Tout=tf.float64), tf.matmul(cube[:, None], cube[None])]
    found += [tf.matmul(tf.transpose(cube, [1, 2, 0]), tf.transpose(cube, [1, 0, 2]))]
    found += [tf.einsum("ni,nj->ij", x, x), tf.einsum("ni,ij->nj", x, w), tf.einsum("...i,ij->...j", cube, w[:2])]
    found += [tf.einsum("ni,mi->nm", x, x), tf.einsum("nij->jn", cube), tf.einsum("nij->i", cube)]
    found += [tf.einsum("ni,i->", x, inf[:, 0]), tf.einsum("ij,ni->j", inf, x)]
    found += [tf.einsum("nij,nkj->nik", cube, cube), tf.einsum("ni,n->i", x, x[:, 0]), tf.einsum("ij->ji", gram)]
    bias = tf.constant([1.0, 2.0, 3.0], tf.float64)
    found += [tf.nn.bias_add(x, bias), tf.nn.bias_add(x, tf.reduce_sum(x, 0)), tf.nn.bias_add(gram, bias)]
    found += [
        raw.BiasAddGrad(out_backprop=x),
        raw.BiasAddGrad(out_backprop=gram),
        tf.nn.bias_add(tf.transpose(gram), x[0]),
    ]
    images = tf.reshape(cube, [-1, 2, 2, 1]) * bias
    found += [
        raw.BiasAddGrad(out_backprop=images),
        raw.BiasAdd(value=tf.transpose(images, [0, 3, 1, 2]), bias=bias, data_format="NCHW"),
    ]
    found += [raw.BiasAddGrad(out_backprop=tf.transpose(images, [0, 3, 1, 2]), data_format="NCHW")]
    complexes = [
        tf.matmul(c, c, adjoint_a=True),
        tf.matmul(c[:, None], c[:, None], adjoint_b=True),
        tf.einsum("ni,nj->ij", c, c),
    ]
    whole = [tf.cast(x * 10, tf.int32), tf.cast(x * 10, tf.int32)]
    found.append(tf.matmul(whole[0], whole[1], transpose_a=True))
    return found + [each for c in complexes for each in (tf.math.real(c), tf.math.imag(c))]


def _images(x: Any, *shape: int) -> Any:
    count = int(np.prod(shape))
    table = np.sin(np.arange(3.0 * count)).reshape(3, count)
    return tf.reshape(tf.tanh(tf.matmul(x, table)), [-1, *shape])


def _filter(*shape: int) -> Any:
    return tf.constant(np.cos(np.arange(np.prod(shape), dtype=float)).reshape(shape))


def _with_gradients(function: Callable[..., Any], *values: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        for each in values:
            tape.watch(each)
        found = function(*values)
        loss = tf.reduce_sum(tf.square(found)) / 7
    return [found, *tape.gradient(loss, values)]


@case("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
def conv_2d(x: Any) -> Any:
    found = _with_gradients(
        lambda a, k: tf.nn.conv2d(a, k, [1, 2, 1, 1], "SAME"), _images(x, 5, 4, 2), _filter(3, 2, 2, 3)
    )
    shape = tf.stack([tf.shape(x)[0], 5, 4, 2])
    found += [tf.nn.conv2d_transpose(_images(x, 5, 4, 3), _filter(3, 2, 2, 3), shape, 1)]
    return found


@case("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2")
def conv_3d(x: Any) -> Any:
    return _with_gradients(
        lambda a, k: tf.nn.conv3d(a, k, [1] * 5, "VALID"), _images(x, 3, 3, 2, 1), _filter(2, 2, 2, 1, 2)
    )


@case("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter")
def depthwise(x: Any) -> Any:
    return _with_gradients(
        lambda a, k: tf.nn.depthwise_conv2d(a, k, [1] * 4, "SAME"), _images(x, 4, 3, 2), _filter(2, 2, 2, 2)
    )


@case("Dilation2D", "LRN", "LRNGrad", "SpaceToDepth", "DepthToSpace")
def of_images(x: Any) -> Any:
    images = _images(x, 4, 4, 4)
    single = tf.cast(images, tf.float32)
    found = _with_gradients(lambda a: tf.nn.local_response_normalization(a, 2), single)
    found += [raw.Dilation2D(input=images, filter=_filter(2, 2, 4), strides=[1] * 4, rates=[1] * 4, padding="SAME")]
    return found + [tf.nn.space_to_depth(images, 2), tf.nn.depth_to_space(images, 2)]


@case("MaxPool", "MaxPoolGrad", "MaxPoolGradGrad", "AvgPool", "AvgPoolGrad")
def pools(x: Any) -> Any:
    images = _images(x, 4, 4, 2)
    found = _with_gradients(lambda a: tf.nn.max_pool2d(a, 2, 2, "VALID"), images)
    found += _with_gradients(lambda a: tf.nn.avg_pool2d(a, 3, 2, "SAME"), images)
    out = tf.nn.max_pool2d(images, 2, 2, "VALID")
    numbers = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    return [*found, raw.MaxPoolGradGrad(orig_input=images, orig_output=out, grad=images * 2, **numbers)]


@case("MaxPool3D", "MaxPool3DGrad", "AvgPool3D", "AvgPool3DGrad")
def pools_3d(x: Any) -> Any:
    single = tf.cast(_images(x, 4, 2, 2, 1), tf.float32)
    found = _with_gradients(lambda a: tf.nn.avg_pool3d(a, 2, 2, "SAME"), single)
    return found + _with_gradients(lambda a: tf.nn.max_pool3d(a, 2, 2, "SAME"), single)


@case("ResizeBilinear", "ResizeBilinearGrad", "ResizeNearestNeighbor", "ResizeNearestNeighborGrad")
@case("ResizeBicubic", "ResizeBicubicGrad", "ResizeArea", "ScaleAndTranslate")
def resized(x: Any) -> Any:
    images = _images(x, 3, 4, 2)
    found = []
    for method in ("bilinear", "nearest", "bicubic"):
        found += _with_gradients(
            lambda a, method=method: tf.cast(tf.image.resize(a, [5, 6], method), tf.float64), images
        )
    found += [tf.image.resize(images, [2, 3], "area"), tf.image.resize(images, [2, 3], antialias=True)]
    return found


@case("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "L2Loss")
def reductions(x: Any) -> Any:
    cube = _images(x, 2, 3)
    whole = tf.cast(x * 10, tf.int32)
    found = []
    for axes in ([0], [1], [0, 2], [-1, 1], [0, 1, 2], [], None):
        for keep in (False, True):
            for function in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod):
                found.append(function(cube, axes, keepdims=keep))
    for function in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod):
        found += [function(whole, 0), function(tf.cast(whole, tf.int16), 0), function(tf.transpose(cube), 2)]
        found += [function(function(cube, 0), 0), function(tf.reduce_sum(whole, 0)), function(cube[:, :0], 1)]
        found += [function(cube[:, :0], 0), function(cube[:, :0])]
    found += [tf.reduce_all(x > -1, 0), tf.reduce_any(x > 1, 0), tf.reduce_all(x > 0), tf.reduce_any(x > 0, 1)]
    found += [tf.reduce_any(tf.reduce_all(x > -1, 0)), tf.reduce_all(~tf.reduce_any(x > 1, 0))]
    return found + [tf.nn.l2_loss(x), tf.nn.l2_loss(tf.reduce_sum(x, 0)), tf.reduce_sum(x / (x - x))]


@case("ArgMax", "ArgMin", "Cumsum", "Cumprod", "CumulativeLogsumexp", "TopKV2")
def along_an_axis(x: Any) -> Any:
    found = []
    for axis in (0, 1, -1):
        found += [tf.argmax(x, axis), tf.argmin(x, axis, tf.int32), tf.cumsum(x, axis, exclusive=True)]
        found += [tf.math.cumprod(x, axis, reverse=True), tf.math.cumulative_logsumexp(x, axis)]
    s = tf.reduce_sum(x, 0)
    found += [tf.argmax(s), tf.cumsum(s), *tf.math.top_k(x, 2), *tf.math.top_k(tf.transpose(x), 1)]
    return found


@case("Softmax", "LogSoftmax", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
@case("InTopK", "InTopKV2")
def losses(x: Any) -> Any:
    labels = tf.argmax(x[:, ::-1], 1, tf.int32)
    ones = tf.one_hot(labels, 3, dtype=tf.float64)
    found = _with_gradients(lambda a: tf.nn.softmax_cross_entropy_with_logits(ones, a), x)
    found += _with_gradients(lambda a: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, a), x)
    found += [tf.nn.softmax(x), tf.nn.softmax(x, 0), tf.nn.log_softmax(x), tf.nn.log_softmax(tf.transpose(x))]
    found += [raw.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.constant([[0.2, 0.3, 0.5]], tf.float64)).loss]
    single = tf.cast(x, tf.float32)
    found += [
        raw.InTopK(predictions=single, targets=labels, k=2),
        raw.InTopKV2(predictions=single, targets=labels, k=1),
    ]
    of_all = raw.SoftmaxCrossEntropyWithLogits(features=tf.reduce_sum(x, 0)[None], labels=ones)
    found += [of_all.loss, of_all.loss + x[:, 0], of_all.backprop * x]
    return [*found, tf.nn.softmax_cross_entropy_with_logits(ones[:, :], tf.reduce_sum(x, 0)[None] + x)]


@case("GatherV2", "OneHot", "UnsortedSegmentSum")
def by_index(x: Any) -> Any:
    at = tf.argmax(x, 1)
    table = tf.constant(np.arange(12.0).reshape(3, 4))
    cube = _images(x, 3, 2)
    found = [tf.gather(table, at), tf.gather(table, at, axis=1), tf.gather(x, [2, 0], axis=1), tf.gather(x, [0, 0])]
    found += [
        tf.gather(cube, at, batch_dims=1),
        tf.gather(cube, tf.argmax(cube, 1), batch_dims=1),
        tf.gather(x, tf.argsort(x[:, 0])),
    ]
    found += [
        tf.gather(tf.reduce_sum(x, 0), [1, 1]),
        tf.gather(tf.reduce_sum(x, 0), at),
        tf.gather(cube, [[1, 0]], axis=1),
    ]
    found += [
        tf.gather(tf.transpose(x), at, axis=0),
        tf.gather(tf.transpose(x), tf.constant([2, 1])),
        tf.gather(x, at, axis=1),
    ]
    found += [
        tf.one_hot(at, 3),
        tf.one_hot(at, 3, axis=0),
        tf.one_hot(tf.argmax(cube, 1), 3, axis=1),
        tf.one_hot(tf.argmax(x, 0), 3),
    ]
    big = tf.zeros([40, 2], tf.float64)
    found += [tf.math.unsorted_segment_sum(x, at, 3), tf.math.unsorted_segment_sum(x[:, 0], at - 1, 2)]
    found += [tf.math.unsorted_segment_sum(x, tf.argmax(cube, 1)[:, :1] * tf.ones([1, 3], tf.int64), 3)]
    with tf.GradientTape() as tape:
        tape.watch(big)
        loss = tf.reduce_sum(tf.gather(big, at * 7) * x[:, :2])
    return [
        *found,
        tf.convert_to_tensor(tape.gradient(loss, big)),
        tf.gather(x, tf.reduce_sum(tf.cast(at, tf.int32)) * 0),
    ]


@case("ResourceGather")
def looked_up(x: Any) -> Any:
    handle = raw.VarHandleOp(dtype=tf.float64, shape=[3, 4], shared_name="table")
    table = tf.constant(np.arange(12.0).reshape(3, 4))
    with tf.control_dependencies([raw.AssignVariableOp(resource=handle, value=table)]):
        handle = tf.identity(handle)
    found = [raw.ResourceGather(resource=handle, indices=tf.argmax(x, 1), dtype=tf.float64)]
    found += [raw.ResourceGather(resource=handle, indices=tf.argmax(x, 0) * 0, dtype=tf.float64)]
    return [*found, raw.ResourceGather(resource=handle, indices=tf.argmax(_images(x, 3, 2), 1), dtype=tf.float64)]


@case("Shape", "ShapeN", "Size", "Rank")
def shapes(x: Any) -> Any:
    s = tf.reduce_sum(x, 0)
    both = raw.ShapeN(input=[x, tf.transpose(x), s])
    return [
        raw.Shape(input=x),
        *both,
        raw.Size(input=x),
        raw.Rank(input=x),
        raw.Shape(input=s),
        raw.Shape(input=x[0, 0]),
    ]


@case("Reshape", "ExpandDims", "Squeeze", "Transpose", "ConjugateTranspose", "BroadcastTo", "Fill", "EnsureShape")
def shaped(x: Any) -> Any:
    rows, cube, s = tf.shape(x)[0], _images(x, 2, 3), tf.reduce_sum(x, 0)
    flat = tf.reshape(cube, [-1, 3])
    found = [
        flat,
        tf.reshape(flat, [rows, 2, 3]),
        tf.reshape(flat, [-1]),
        tf.reshape(tf.transpose(x), [-1]),
        tf.reshape(s, [3, 1]),
    ]
    found += [
        tf.reshape(tf.transpose(cube, [1, 0, 2]), [-1, 3]),
        tf.reshape(tf.transpose(x), [3, rows, 1]),
        tf.reshape(x, [3, -1]),
    ]
    found += [tf.reshape(tf.tile(x, [2, 1]), [2, rows, 3]), tf.reshape(tf.tile(x, [2, 1]), [rows, 2, 3])]
    found += [
        x[:, None],
        tf.expand_dims(x, -1),
        tf.expand_dims(s, 0),
        tf.squeeze(x[:, :1], 1),
        tf.squeeze(x[:, None]),
        tf.squeeze(s[None]),
    ]
    found += [
        tf.transpose(cube, [2, 0, 1]),
        tf.transpose(cube, [-1, 0, -2]),
        tf.transpose(s),
        tf.transpose(tf.reduce_max(cube, 0)),
        tf.squeeze(x[:, None], [-2]),
    ]
    c = tf.transpose(tf.complex(x, x), conjugate=True)
    found += [
        tf.math.real(c),
        tf.math.imag(c),
        tf.broadcast_to(x[:, None], [rows, 4, 3]),
        tf.broadcast_to(s, [rows, 3]),
        tf.broadcast_to(x, [2, rows, 3]),
    ]
    found += [
        tf.ensure_shape(x, [None, 3]),
        tf.ensure_shape(s, [3]),
        tf.fill([rows, 3], tf.reduce_sum(x)) * x,
        tf.fill([rows], 2.0),
    ]
    ones = tf.fill([rows, 3], tf.constant(2.0, tf.float64))
    return [
        *found,
        tf.concat([ones * 3, x], 1),
        tf.concat([x, tf.broadcast_to(tf.constant([[7.0]], tf.float64), [rows, 1])], 1),
    ]


@case("StridedSlice", "StridedSliceGrad", "Slice")
def sliced(x: Any) -> Any:
    rows, cube = tf.shape(x)[0], _images(x, 2, 3)
    both = tf.concat([x, x * 2, x * 3], 0)
    parts: list[Callable[[Any], Any]] = [
        lambda v: v[:, 1:],
        lambda v: v[1:],
        lambda v: v[::-1],
        lambda v: v[::2],
        lambda v: v[:, ::-1],
        lambda v: v[..., 0],
        lambda v: v[0],
        lambda v: v[-1],
        lambda v: v[None, :, 1],
        lambda v: v[:, None],
        lambda v: v[0:rows],
        lambda v: v[:100],
        lambda v: v[:, :0],
        lambda v: v[3:2],
        lambda v: v[..., None, 0],
        lambda v: v[:, -2:],
        lambda v: v[-1:],
        lambda v: v[:-1],
    ]
    found = [each for part in parts for v in (x, cube) for each in _with_gradients(part, v)]
    found += [part(tf.tile(tf.transpose(x), [1, 3])) for part in parts]
    for part in (
        lambda v: v[:rows],
        lambda v: v[rows:],
        lambda v: v[rows : 2 * rows],
        lambda v: v[rows:, 1],
        lambda v: v[1:],
    ):
        found += _with_gradients(part, both)
    s = tf.reduce_sum(cube, 0)
    found += [
        s[0],
        s[:, 1:],
        *_with_gradients(lambda v: v[1:], s),
        *_with_gradients(lambda v: tf.reduce_sum(v, 0)[0], cube),
    ]
    found += [
        tf.slice(x, [0, 1], [-1, 2]),
        tf.slice(x, [0, 1], [rows, 1]),
        tf.slice(x, [0, 0], [1, 2]),
        tf.slice(s, [1, 0], [1, 2]),
    ]
    return found


@case("ConcatV2", "Pack", "Unpack", "Split", "SplitV")
def put_together(x: Any) -> Any:
    rows, s, m = tf.shape(x)[0], tf.reduce_sum(x, 0), tf.reduce_max(x, 0)
    fixed = tf.constant(np.arange(15.0).reshape(5, 3))
    found = [
        tf.concat([x, fixed], 0),
        tf.concat([fixed, x, x], 0),
        tf.concat([x, x * 2], 1),
        tf.concat([x, tf.ones_like(x)], -1),
    ]
    found += [
        tf.concat([s, s], 0),
        tf.concat([s, m], 0),
        tf.concat([s[None], x], 0),
        tf.concat([tf.transpose(x), tf.transpose(x)], 1),
    ]
    for axis in (0, 1, 2, -1):
        found += [tf.stack([x, x * 2], axis), tf.stack([x, tf.zeros_like(x)], axis)]
    found += [
        tf.stack([s, s]),
        tf.stack([s, m], 1),
        tf.stack([x[0], s]),
        *tf.unstack(x, axis=1),
        *tf.unstack(s),
        *tf.unstack(m),
    ]
    found += [
        *tf.unstack(tf.transpose(x)),
        *tf.split(x, 3, 1),
        *tf.split(x, [1, 2], 1),
        *tf.split(s, [2, 1]),
        *tf.split(s, 3),
    ]
    both = tf.concat([x, x * 3], 0)
    found += [*tf.split(both, 2), *tf.split(both, [rows, rows]), *tf.split(tf.concat([both, both], 0), 2), both[:rows]]
    wide = tf.reshape(_images(x, 2, 2), [-1, 2])
    return [
        *found,
        *tf.split(wide, 2),
        tf.concat([wide, wide], 0),
        tf.concat([wide, x[:, :2]], 0),
        tf.concat([x[:, :2], wide], 0),
    ]


@case("Pad", "PadV2", "MirrorPad", "MirrorPadGrad", "Tile", "ReverseV2")
def repeated(x: Any) -> Any:
    cube = _images(x, 3, 4)
    found = [tf.pad(x, [[0, 0], [1, 2]]), tf.pad(x, [[1, 0], [0, 0]]), tf.pad(x, [[0, 0], [1, 0]], constant_values=3.0)]
    for mode in ("REFLECT", "SYMMETRIC"):
        found += _with_gradients(lambda v, mode=mode: tf.pad(v, [[0, 0], [1, 1], [2, 0]], mode), cube)
    found += _with_gradients(lambda v: tf.tile(v, [1, 2]), x) + _with_gradients(lambda v: tf.tile(v, [3, 1]), x)
    found += [
        tf.tile(tf.reduce_sum(x, 0), [2]),
        tf.tile(tf.transpose(x), [2, 2]),
        tf.tile(x, [0, 1]),
        tf.tile(x, tf.argmax(x[0, :2]) * [0, 1] + 1),
    ]
    found += [
        tf.tile(x[:, None], [1, 2, 1]),
        tf.repeat(x, 2, 0),
        tf.reverse(x, [1]),
        tf.reverse(x, [0]),
        tf.reverse(tf.transpose(x), [-1, 0]),
    ]
    return [*found, tf.pad(tf.reduce_sum(x, 0), [[1, 1]])]


@case("StringLower", "StringUpper", "StringStrip", "StringLength", "AsString", "StringToNumber", "StringToHashBucket")
@case("StringToHashBucketFast", "StringToHashBucketStrong", "StaticRegexReplace", "StaticRegexFullMatch")
@case("RegexReplace", "RegexFullMatch", "DecodeBase64", "EncodeBase64", "UnicodeTranscode", "UnicodeScript")
@case("StringJoin", "Substr", "Bucketize")
def texts(x: Any) -> Any:
    numbers = tf.cast(x * 100, tf.int32)
    text = tf.strings.as_string(numbers)
    mixed = tf.strings.join(["  aB", text, "\u00e9 "])
    found = [text, mixed, tf.strings.lower(mixed), tf.strings.upper(mixed), tf.strings.strip(mixed)]
    found += [tf.strings.length(mixed), tf.strings.to_number(text), tf.strings.as_string(tf.reduce_sum(numbers, 0))]
    found += [raw.StringToHashBucket(string_tensor=text, num_buckets=7), tf.strings.to_hash_bucket_fast(text, 9)]
    found += [
        tf.strings.to_hash_bucket_strong(tf.transpose(text), 9, [1, 2]),
        tf.strings.regex_replace(text, "1", "one"),
    ]
    found += [tf.strings.regex_full_match(text, "-.*"), tf.strings.join([text, text[:, ::-1], "x"], "/")]
    pattern = tf.strings.as_string(tf.reduce_max(numbers) % 10)
    found += [raw.RegexReplace(input=text, pattern=pattern, rewrite="[\\0]")]
    found += [raw.RegexFullMatch(input=text, pattern=tf.strings.join([".*", pattern])), tf.sort(numbers, 0)]
    found += [
        tf.io.decode_base64(tf.io.encode_base64(mixed)),
        tf.strings.unicode_transcode(mixed, "UTF-8", "UTF-16-BE"),
    ]
    found += [tf.strings.unicode_script(numbers), tf.strings.substr(mixed, 1, 2)]
    found += [tf.strings.substr(mixed, tf.cast(x[:, :1] > 0, tf.int32), tf.cast(x[:, 1:2] > 0, tf.int32) + 1)]
    column, line = text[:, 0], tf.constant(["a", "b", "c"])
    found += [tf.strings.join([column, column]), tf.gather(line, tf.argmax(x, 1)), tf.reverse(text, [0])]
    found += [raw.Bucketize(input=x, boundaries=[-0.5, 0.0, 1.0]), raw.Bucketize(input=tf.transpose(x), boundaries=[])]
    return [*found, tf.strings.reduce_join(text, 1), tf.strings.reduce_join(text, 0)]


def _found(table: Any, keys: Any, missing: Any) -> Any:
    return raw.LookupTableFindV2(table_handle=table, keys=keys, default_value=missing)


@case("LookupTableFindV2")
def tables(x: Any) -> Any:
    keys = tf.cast(x * 3, tf.int64)

    def filled(keys: Any, values: Any, handle: Any) -> Any:
        keys = tf.constant(keys, tf.int64)
        with tf.control_dependencies([raw.LookupTableInsertV2(table_handle=handle, keys=keys, values=values)]):
            return tf.identity(handle)

    types = {"key_dtype": tf.int64, "value_dtype": tf.float64}
    numbers = filled([0, 1, -1], tf.constant([5.0, 6.0, 7.0], tf.float64), raw.MutableHashTableV2(**types))
    missing = tf.constant(0.5, tf.float64)
    found = [_found(numbers, keys, missing), _found(numbers, tf.transpose(keys), tf.reduce_max(x))]
    found += [_found(numbers, keys[:, 0], missing), _found(numbers, tf.reduce_max(keys, 0), missing)]
    vectors = raw.MutableHashTableOfTensorsV2(**types, value_shape=[2])
    vectors = filled([0, 1], tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64), vectors)
    found += [_found(vectors, keys[:, 0], missing[None] * [1, 2])]
    pairs = raw.MutableDenseHashTableV2(
        empty_key=tf.constant([99, 99], tf.int64), deleted_key=tf.constant([98, 98], tf.int64), value_dtype=tf.float64
    )
    pairs = filled([[0, 0], [1, 1]], tf.constant([1.0, 2.0], tf.float64), pairs)
    found += [_found(pairs, keys[:, :2], missing), _found(pairs, keys[:, 1:], missing)]
    return found


@case("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessRandomUniformIntV2")
@case("StatelessRandomUniformFullIntV2")
def drawn_numbers(x: Any) -> Any:
    rows, found = tf.shape(x)[0], []
    for shape in ([rows, 3], [2 * rows, 3], [rows], [3, rows], [3], [rows, 1, 3]):
        normal = tf.random.stateless_normal(shape, [1, 2], dtype=tf.float64)
        found += [normal, tf.random.stateless_uniform(shape, [3, 4], dtype=tf.float64)]
        found += [tf.random.stateless_uniform(shape, [5, 6], 0, 9, tf.int32)]
        found += [tf.random.stateless_uniform(shape, [7, 8], None, None, tf.int64)]
        found += [normal * x[:, :1] if len(shape) == 2 and shape[0] is rows else normal * 2]
    return found


@case("DenseBincount")
def counted(x: Any) -> Any:
    entries, size = tf.cast(tf.abs(x) * 2, tf.int32), tf.constant(3)
    none = tf.zeros([0], tf.float64)
    options = [
        (entries, none),
        (entries[:, 0], none),
        (entries, x),
        (entries[:, 0], x[:, 1]),
        (tf.transpose(entries), none),
    ]
    found = [raw.DenseBincount(input=value, size=size, weights=weights) for value, weights in options]
    found += [raw.DenseBincount(input=value, size=size, weights=none, binary_output=True) for value, _ in options]
    most = tf.reduce_max(entries) + 1
    return [*found, raw.DenseBincount(input=entries, size=most, weights=none), tf.math.bincount(entries, axis=-1)]


@case("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def transformed(x: Any) -> Any:
    images, size = _images(x, 4, 3, 2), tf.constant([3, 4])
    each = tf.cast(tf.pad(x, [[0, 0], [0, 5]]) * 0.1, tf.float32) + tf.constant([1.0, 0, 0, 0, 1, 0, 0, 0])
    one, options = each[:1] * 0 + [1.0, 0.2, 0, 0, 0.9, 0.5, 0, 0], {"output_shape": size, "interpolation": "BILINEAR"}
    found = []
    for transforms in (each, one, tf.constant([[1.0, 0.2, 0, 0, 0.9, 0.5, 0, 0]])):
        found += [raw.ImageProjectiveTransformV2(images=images, transforms=transforms, **options)]
        found += [raw.ImageProjectiveTransformV3(images=images, transforms=transforms, fill_value=2.0, **options)]
    return found
