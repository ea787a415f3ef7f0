"""Lines of drawn programs for every type of operation with a rule, and for moving, counting and looking up rows."""

from __future__ import annotations

from collections.abc import Callable

from cut.drawn.programs import Drawing
from cut.operations import operands

from keras_ddl.cut.specs import entrywise

LINES: list[Callable[[Drawing], str]] = []
# Division by values near zero gives numbers too large to compare.
_POSITIVE = operands.POSITIVE | {"Polygamma", "Reciprocal", "Inv", "RealDiv", "Div"}
_UNARY = [each for each in entrywise.UNARY if each != "Conj"]
_BINARY = [each for each in entrywise.BINARY if each != "SelectV2"]


def line(function: Callable[[Drawing], str]) -> Callable[[Drawing], str]:
    LINES.append(function)
    return function


def _operand(d: Drawing, kind: str, ranks: tuple[int, ...] = (0, 1, 2, 3, 4)) -> str:
    if kind in operands.BOOLS:
        return d.pick("b", ranks)
    if kind in operands.INTEGERS | operands.DIVISIONS:
        return f"tf.cast(tf.abs({d.pick('i', ranks)}) % 7 + 1, tf.int32)"
    name = d.pick("f", ranks)
    if kind in _POSITIVE:
        return f"(tf.abs({name}) + 1.5)"
    return f"(tf.tanh({name}) * 0.4 + 0.5)" if kind in operands.SMALL else name


@line
def _of_one(d: Drawing) -> str:
    kind = d.one_of(*_UNARY)
    return f"call('{kind}', {_operand(d, kind)})"


@line
def _of_two(d: Drawing) -> str:
    kind = d.one_of(*_BINARY)
    a, b = _operand(d, kind), _operand(d, kind)
    if kind == "Polygamma":
        a = f"tf.ones_like({b})"
    return f"call('{kind}', {a}, {d.one_of(b, b, a)})"


@line
def _shaped_by_shapes(d: Drawing) -> str:
    a, b = d.pick(ranks=(1, 2, 3)), d.pick(ranks=(1, 2, 3))
    axis = d.axis(a)
    return d.one_of(
        f"tf.reshape({a}, tf.concat([tf.shape({a})[:1], [-1]], 0))",
        f"tf.reshape({a}, [tf.shape({b})[0], -1])",
        f"tf.reshape({a}, tf.shape({b}))",
        f"tf.reshape({a}, [tf.size({a}) // (B * 2), 2, B])",
        f"tf.reshape({a}, [tf.shape({a})[{axis}], -1])",
        f"tf.broadcast_to({a}, tf.broadcast_dynamic_shape(tf.shape({a}), tf.shape({b})))",
        f"tf.eye(B, dtype=tf.float64) * {a}",
        f"tf.tile({a}, tf.concat([[B], tf.ones([tf.rank({a}) - 1], tf.int32)], 0))",
        f"tf.meshgrid({a}[0] if {d.rank(a)} > 1 else {a}, tf.cast(tf.range(B), tf.float64))[{d.one_of(0, 1)}]",
        f"{a} / tf.cast(tf.maximum(B, tf.shape({a})[{axis}]), tf.float64)",
        f"tf.ensure_shape({a}, [None] * {d.rank(a)})",
    )


@line
def _cut_out(d: Drawing) -> str:
    a, b = d.pick(ranks=(1, 2, 3, 4)), d.pick(ranks=(1, 2, 3))
    part = d.one_of(
        "1:", ":-1", "::2", "::-1", "0", "-1", ":1", ":B", "2 * B:", "1::2", "None, :", "B // 2:", "1:B", "-B:",
        f":tf.shape({b})[0]", "B // 2", "tf.newaxis, ..., 0", ":, tf.newaxis", "..., tf.newaxis, 0", "B - 1::-1", "3:1",
        "tf.reduce_max(y) % 2", "tf.reduce_max(y) % 2:", ":2 * B:2", "tf.minimum(1, B - 1):",
    )  # fmt: skip
    rank = d.rank(a)
    return d.one_of(
        f"{a}[{d.one_of('', '', ':, ', '..., ')}{part}]",
        f"tf.slice({a}, [0] * {rank}, [B // 2 + 1] + [-1] * {rank - 1})",
        f"tf.slice({a}, [1] + [0] * {rank - 1}, [-1] * {rank})",
        f"tf.strided_slice({a}, [0, 0], [B, 2], [1, 1], begin_mask={d.one_of(0, 1, 2, 3)}, end_mask={d.one_of(0, 1)})",
    )


@line
def _found_by_index(d: Drawing) -> str:
    a, i = d.pick(ranks=(1, 2, 3)), d.pick("i", ranks=(1, 2))
    n = f"tf.cast(tf.shape({a})[0], {i}.dtype)"
    tail = f"tf.concat([[B + 1], tf.shape({a})[1:]], 0)"
    r = "tf.range(B)"
    return d.one_of(
        f"tf.gather({a}, tf.abs({i}) % {n})",
        f"tf.gather(table, {i} % 4)",
        f"tf.gather({a}, {i} % 2, axis=-1)",
        f"tf.gather({a}, y % 3, axis=1, batch_dims=1)",
        f"tf.one_hot({i} % 5, 4, axis=0, dtype=tf.float64)",
        f"tf.math.unsorted_segment_max(tf.tanh({a}), y, 4)",
        "tf.gather(tf.gather(table, y), y % 3, batch_dims=1)",
        f"tf.gather_nd({a}, tf.abs({i} % {n})[..., None])",
        f"tf.scatter_nd({r}[:, None], {a}, {tail})",
        f"tf.scatter_nd(tf.cast(y, tf.int32)[:, None], {a}, tf.concat([[4], tf.shape({a})[1:]], 0))",
        f"tf.tensor_scatter_nd_add({a}, [[0], [0]], tf.ones_like({a})[:1] * [[2.0]] + {a}[:1])",
        f"tf.math.segment_sum({a}, tf.sort(y))",
        f"tf.math.unsorted_segment_prod(tf.tanh({a}), y, 4)",
        f"tf.math.unsorted_segment_sum({a}, y, B)",
        f"tf.dynamic_partition({a}, tf.cast(y > 1, tf.int32), 2)[{d.one_of(0, 1)}]",
        f"tf.dynamic_stitch([{r}, {r} + B], [{a}, -{a}])",
        f"tf.math.bincount(tf.cast(y, tf.int32), weights={a})",
        f"tf.boolean_mask({a}, y > 1)",
        f"tf.repeat({a}, y % 3, axis=0)",
        f"tf.reverse_sequence({a}, y % 3 + 1, 1)",
        f"tf.gather({a}, tf.argsort({a}[..., 0], axis=-1), batch_dims={d.one_of(0, 1)})",
        f"tf.gather({a}, tf.random.experimental.stateless_shuffle({r}, [1, 2]))",
        f"tf.searchsorted(tf.sort(u[:, 0]), {a}[..., 0])",
    )


@line
def _in_order(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    axis = d.axis(a)
    return d.one_of(
        f"tf.sort({a}, {axis})",
        f"tf.math.top_k({a}, 1).values",
        f"tf.math.top_k(tf.transpose({a}), B).values",
        f"tf.math.cumprod(tf.tanh({a}), {axis})",
        f"tf.nn.softmax({a}, {axis})",
        f"tf.cumsum({a}, {axis}, exclusive=True, reverse=True)",
        f"tf.math.cumulative_logsumexp({a}, {axis})",
        f"tf.argmax({a}, {axis})",
        f"tf.argsort({a}, {axis}, stable=True)",
        f"tf.math.count_nonzero({a} > 0.2, {axis})",
        f"tf.math.in_top_k(y % 3, tf.cast({a}, tf.float32), 2)",
        f"tf.clip_by_value({a}, tf.reduce_min({a}, 0), tf.reduce_mean({a}, 0))",
        f"tf.clip_by_global_norm([{a}, v], 0.5)[0][{d.one_of(0, 1)}]",
        f"({a} - tf.nn.moments({a}, [0])[0]) * tf.math.rsqrt(tf.nn.moments({a}, [0])[1] + 0.1)",
    )


@line
def _einsums(d: Drawing) -> str:
    equation = d.one_of(
        "bi,bj->bij", "bi,ci->bc", "bij,bkj->bik", "bij,bj->bi", "bij,jk->bik", "bij,kj->bki", "b,bi->i", "ab,bc->ac",
        "bij,bij->", "bij->jib", "bi->b", "bij,bi->bj", "...ij,...jk->...ik", "bij,cj->bci", "b,c->bc", "bij,cij->bc",
        "bi,bi->b", "bij,cjk->bcik", "bi,bc->ic", "i...,i...->...", "bi,b->bi", "bij,b->ij", "b...,b->...", "ij,bj->bi",
    )  # fmt: skip
    texts = equation.split("->")[0].split(",")
    names = [d.pick(ranks=(2, 3) if "." in text else (len(text),)) for text in texts]
    if len(names) == 2 and d.one_of(True, False):
        names[1] = names[0]
    return f"tf.einsum('{equation}', {', '.join(names)})"


@line
def _stacks(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    b = d.one_of(d.pick(like=a), d.pick(ranks=(d.rank(a),)), f"tf.ones_like({a})")
    axis = d.axis(a)
    return d.one_of(
        f"tf.split({a}, {d.one_of(2, 3)}, {axis})[{d.one_of(0, -1)}]",
        f"tf.unstack({a}, axis={axis})[0]",
        f"tf.split({a}, [1, tf.shape({a})[{axis}] - 1], {axis})[1]",
        f"tf.split(tf.concat([{a}, {b}], 0), 2)[1]",
        f"tf.split(tf.concat([{a}, {b}], 0), [B, B])[{d.one_of(0, 1)}]",
        f"tf.concat([{a}, {b}, {a}], 0)[:2 * B]",
        f"tf.reshape(tf.concat([{a}, {b}], 0), tf.concat([[2, B], tf.shape({a})[1:]], 0))",
        f"tf.reshape(tf.stack([{a}, {b}], 1), tf.concat([[-1], tf.shape({a})[1:]], 0))",
        f"tf.concat([{a}, tf.reduce_sum({a}, 0, keepdims=True)], 0)",
        f"tf.pad({a}, [[0, 0]] * {d.rank(a) - 1} + [[1, 1]], '{d.one_of('REFLECT', 'SYMMETRIC')}')",
        f"tf.pad({a}, [[B, 1]] + [[0, 0]] * {d.rank(a) - 1})",
        f"tf.bitcast(tf.bitcast({a}, tf.int64), tf.float64)",
        f"listed({a}, '{d.one_of('stack', 'gather', 'set', 'push', 'new', 'reserve')}')",
    )


@line
def _random(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    seed = f"[{d.rng.integers(9)}, {d.rng.integers(9)}]"
    kind = d.one_of("uniform", "normal", "truncated_normal")
    shape = d.one_of(f"tf.shape({a})", "[B, 4]", "[B]", "[2 * B, 3]", f"[B, tf.shape({a})[-1]]", "[3, B]", "[4]")
    return d.one_of(
        f"tf.random.stateless_{kind}({shape}, {seed}, dtype=tf.float64)",
        f"{a} * tf.random.stateless_{kind}(tf.shape({a}), {seed}, dtype=tf.float64)",
        f"tf.nn.experimental.stateless_dropout({a}, 0.3, {seed})",
        f"tf.random.stateless_uniform({shape}, {seed}, 0, 4, tf.{d.one_of('int32', 'int64')})",
    )


@line
def _integers(d: Drawing) -> str:
    i, j, a = d.pick("i"), d.pick("i"), d.pick()
    b = d.pick("b", ranks=(0, 1, 2, 3)) if d.one_of(True, False) else f"({a} > 0.1)"
    return d.one_of(
        f"{i} + tf.cast({j}, {i}.dtype)",
        f"{i} * tf.cast({j}, {i}.dtype)",
        f"{i} // 2",
        f"tf.reduce_sum({i})",
        f"tf.cumsum(y) - {i} % 2",
        f"tf.reduce_prod({i} % 3)",
        f"tf.cast(tf.round(tf.tanh({a}) * 3), tf.{d.one_of('int32', 'int64')})",
        f"tf.cast({i} % 2, tf.bool)",
        f"{i} == tf.cast({j}, {i}.dtype)",
        f"tf.logical_or({b}, {i} > 1)",
        f"tf.reduce_any({b}, 0)",
        f"tf.where({i} > 1, tf.cast({i}, tf.float64), {a})",
        f"tf.reduce_sum(tf.cast({i} % 3, tf.int8), 0)",
        f"tf.cast(tf.shape({a}), tf.float64)",
        "tf.range(B)[:, None] < y",
    )


@line
def _called(d: Drawing) -> str:
    a = d.pick(ranks=(0, 1, 2, 3))
    f = d.one_of(
        "lambda t: tf.tanh(t) * t",
        "lambda t: t / (1.0 + tf.reduce_sum(tf.square(t)))",
        "lambda t: tf.square(t - tf.reduce_mean(t, 0))",
        "lambda t: tf.square(t)[..., None] * t[0]",
    )
    return d.one_of(
        f"inner_gradient({f}, {a})",
        f"called({f}, {a})",
        f"clipped({a})",
        f"tf.recompute_grad({f})({a})",
        f"tf.vectorized_map({f}, {a})",
    )
