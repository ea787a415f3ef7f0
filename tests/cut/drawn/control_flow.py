"""Lines of drawn programs with nested branches and loops."""

from __future__ import annotations

from collections.abc import Callable

from cut.drawn.programs import Drawing

LINES: list[Callable[[Drawing], str]] = []
_DEEPEST = 2


def line(function: Callable[[Drawing], str]) -> Callable[[Drawing], str]:
    LINES.append(function)
    return function


def _kept(d: Drawing, t: str, like: str, count: str | None, depth: int) -> str:
    """Draws an expression of `t` that keeps its shape, which is that of the value `like`."""
    other = d.one_of(d.pick(like=like), d.pick(like=like), f"tf.reduce_mean({d.pick()})")
    if depth < _DEEPEST and d.one_of(True, True, False):
        return d.one_of(_cond, _cond, _loop, _loop, _until, _switch, _carrying, _steps)(d, t, like, count, depth + 1)
    simple = [
        f"{t} * 0.5 + {other}",
        f"tf.tanh({t})",
        f"{t} / (1.0 + tf.reduce_sum(tf.square({t})))",
        f"tf.where({t} > 0.1, {t}, {other})",
        f"tf.reshape(tf.reshape({t}, [-1]), tf.shape({t}))",
        f"tf.ones(tf.shape({t}), tf.float64) * {other}",
        f"{t}",
        f"clipped({t})",
        f"inner_gradient(lambda s: tf.tanh(s) * s, {t})",
        f"called(lambda s: s / (1.5 + tf.abs(s)), {t})",
    ]
    if d.rank(like):
        simple += [
            f"{t}[::-1]",
            f"tf.sort({t}, {d.axis(like)})",
            f"tf.concat([{t}[1:], {t}[:1]], 0)",
            f"tf.nn.softmax({t}, {d.axis(like)})",
            f"tf.gather({t}, tf.range(tf.shape({t})[0]))",
            f"{t} * tf.cast(tf.range(tf.shape({t})[-1]), tf.float64) * 0.2",
        ]
    if count is not None:
        simple += [f"{t} * tf.cast({count}, tf.float64)", f"{t} + tf.cast({count} % 2, tf.float64) * {other}"]
    return str(d.one_of(*simple))


def _choice(d: Drawing, t: str, count: str | None) -> str:
    return str(
        d.one_of(
            f"tf.reduce_sum({t}) > {d.number()}",
            f"tf.reduce_max({d.pick()}) > {d.number()}",
            "tf.reduce_max(y) > 2",
            "tf.constant(B) > 4",
            f"tf.shape({t})[0] > 3" if count is None else f"{count} % 2 == 0",
            "v[0] > 0.0",
        )
    )


def _cond(d: Drawing, t: str, like: str, count: str | None, depth: int) -> str:
    yes, no = _kept(d, t, like, count, depth), _kept(d, t, like, count, depth)
    return f"tf.cond({_choice(d, t, count)}, lambda: {yes}, lambda: {no})"


def _switch(d: Drawing, t: str, like: str, count: str | None, depth: int) -> str:
    branches = ", ".join(f"lambda: {_kept(d, t, like, count, depth)}" for _ in range(3))
    which = d.one_of(
        "tf.cast(tf.reduce_max(y), tf.int32)", "tf.constant(B) % 3", f"tf.cast(tf.reduce_sum({t}), tf.int32)"
    )
    return f"tf.switch_case({which}, [{branches}])"


def _loop(d: Drawing, t: str, like: str, count: str | None, depth: int) -> str:
    i, s = f"i{depth}", f"t{depth}"
    times = d.one_of("2", "3", "tf.cast(tf.reduce_max(y), tf.int32)", f"tf.minimum(tf.size({t}), 3)", "0", "B")
    body = _kept(d, s, like, i, depth)
    return f"tf.while_loop(lambda {i}, {s}: {i} < {times}, lambda {i}, {s}: [{i} + 1, {body}], [0, {t}])[1]"


def _until(d: Drawing, t: str, like: str, count: str | None, depth: int) -> str:
    s = f"t{depth}"
    body = _kept(d, s, like, None, depth)
    bound = d.one_of("1.0", "tf.reduce_sum(tf.abs(v))")
    return (
        f"tf.while_loop(lambda {s}: tf.reduce_sum(tf.abs({s})) > {bound}, lambda {s}: [0.3 * ({body})], [{t}], "
        "maximum_iterations=5)[0]"
    )


def _carrying(d: Drawing, t: str, like: str, count: str | None, depth: int) -> str:
    """Carries a sum, integers or truth values through the rounds beside a tensor of rows."""
    i, s, c = f"i{depth}", f"t{depth}", f"c{depth}"
    body = _kept(d, s, like, i, depth)
    start, change = d.one_of(
        ("tf.zeros([], tf.float64)", f"{c} + tf.reduce_sum({s})"),
        ("tf.zeros([4], tf.float64)", f"tf.maximum({c}, tf.reduce_max(u, 0))"),
        ("tf.zeros_like(u)", f"tf.tanh({c} + u)"),
        ("tf.zeros_like(y)", f"{c} + y"),
        ("y > 1", f"tf.logical_not({c})"),
        ("tf.zeros([], tf.int64)", f"{c} + tf.reduce_sum(y)"),
        ("tf.shape(x)", f"{c} + 0"),
        ("v", f"{c} + u[0]"),
    )
    used = d.one_of(f"{s} * (1.0 + 0.0 * tf.reduce_sum(tf.cast({c}, tf.float64)))", f"{body}", f"{body}")
    part = d.one_of(1, 1, 2)
    given = f"{i}, {s}, {c}"
    body = f"lambda {given}: [{i} + 1, {used}, {change}]"
    found = f"tf.while_loop(lambda {given}: {i} < 2, {body}, [0, {t}, {start}])"
    return f"{found}[1]" if part == 1 else f"({t} + tf.reduce_sum(tf.cast({found}[2], tf.float64)))"


def _steps(d: Drawing, t: str, like: str, count: str | None, depth: int) -> str:
    """Processes the entries along an axis one by one, in lists."""
    if not d.rank(like):
        return f"tf.exp(-tf.square({t}))"
    e = f"e{depth}"
    last = [d.rank(like) - 1, *range(d.rank(like) - 1)]
    back = [*range(1, d.rank(like)), 0]
    elementwise = d.one_of(
        f"tf.tanh({e})",
        f"{e} * 2.0",
        f"{e} - tf.reduce_mean({e})",
        f"tf.cond(tf.reduce_sum({e}) > 0.0, lambda: {e}, lambda: -{e})",
    )
    combined = d.one_of(f"tf.tanh(a + {e})", f"a * 0.5 + {e}", f"tf.maximum(a, {e})")
    return d.one_of(
        f"tf.map_fn(lambda {e}: {elementwise}, {t})",
        f"tf.scan(lambda a, {e}: {combined}, {t})",
        f"tf.transpose(tf.map_fn(lambda {e}: {elementwise}, tf.transpose({t}, {last})), {back})",
        f"tf.transpose(tf.scan(lambda a, {e}: {combined}, tf.transpose({t}, {last})), {back})",
        f"({t} + tf.foldl(lambda a, {e}: {combined}, {t}))",
        f"({t} + tf.foldl(lambda a, {e}: {combined}, tf.transpose({t}, {last}))[..., None])",
        f"in_rounds(lambda i, {e}: {elementwise} * tf.cast(i + 1, tf.float64), {t})",
    )


@line
def _branches_and_loops(d: Drawing) -> str:
    a = d.pick(ranks=(0, 1, 2, 3))
    return str(d.one_of(_cond, _loop, _until, _switch, _carrying, _steps)(d, a, a, None, 1))


@line
def _of_integers(d: Drawing) -> str:
    i = d.pick("i", ranks=(0, 1, 2))
    return d.one_of(
        f"tf.while_loop(lambda a: tf.reduce_max(a) > 2, lambda a: [a // 2], [{i}], maximum_iterations=9)[0]",
        f"tf.while_loop(lambda n, a: n < 3, lambda n, a: [n + 1, a + tf.reduce_max({i})], [0, {i}])[1]",
    )


@line
def _of_other_shapes(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    return d.one_of(
        f"tf.cond(tf.reduce_sum({a}) > {d.number()}, lambda: {a}[1:], lambda: {a}[:1])",
        f"tf.cond(tf.reduce_sum({a}) > {d.number()}, lambda: tf.reduce_sum({a}, 0), lambda: {a}[0])",
        f"tf.cond(v[0] > 0.0, lambda: tf.reduce_sum({a}, 0), lambda: tf.reduce_sum({a}, 0) * 2.0)",
        f"tf.cond(v[0] > 0.0, lambda: tf.concat([{a}, {a}], 0), lambda: tf.concat([{a}, -{a}], 0))",
        f"tf.while_loop(lambda n, a: n < 2, lambda n, a: [n + 1, tf.concat([a, {a}], 0)], [0, {a}], "
        f"[tf.TensorShape([]), tf.TensorShape([None] * {d.rank(a)})])[1]",
        f"tf.while_loop(lambda n, a: n < 2, lambda n, a: [n + 1, tf.reduce_sum({a}, 0) + a], [0, {a}[0]])[1]",
    )
