"""Lines of drawn programs that resemble losses and metrics."""

from __future__ import annotations

from collections.abc import Callable

from cut.drawn.programs import ROWED, Drawing

LINES: list[Callable[[Drawing], str]] = []


def line(function: Callable[[Drawing], str]) -> Callable[[Drawing], str]:
    LINES.append(function)
    return function


@line
def _entry_by_entry(d: Drawing) -> str:
    a = d.pick()
    return d.one_of(
        f"tf.tanh({a})", f"tf.nn.relu({a})", f"tf.exp(-tf.square({a}))", f"-{a}", f"tf.sqrt(tf.abs({a}) + 1.0)"
    )


@line
def _two(d: Drawing) -> str:
    a = d.pick()
    b = d.one_of(d.pick(like=a), d.pick(), d.pick())
    return d.one_of(f"{a} + {b}", f"{a} - {b}", f"{a} * {b}", f"{a} / (1.5 + tf.abs({b}))")


@line
def _two_by_name(d: Drawing) -> str:
    a, b = d.pick(), d.pick()
    return f"tf.{d.one_of('maximum', 'minimum', 'math.squared_difference', 'math.divide_no_nan')}({a}, {b})"


@line
def _pairs(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2))
    return d.one_of(f"{a}[:, None] - {a}", f"tf.abs({a}[None] - {a}[:, None])", f"{a}[..., None] * {a}[:, None]")


@line
def _reduced(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3, 4))
    name = d.one_of("sum", "sum", "mean", "mean", "max", "min", "prod", "logsumexp", "std", "variance")
    operand = f"tf.tanh({a})" if name == "prod" else a
    more = f"{d.axes(a)}, keepdims={d.one_of(True, False)}"
    if name in ("std", "variance"):
        # For equal numbers the deviation's gradient is 0 or NaN, depending on the rounding of their mean.
        found = f"tf.math.reduce_variance({a}, {more})"
        return found if name == "variance" else f"tf.sqrt(0.1 + {found})"
    return f"tf.reduce_{name}({operand}, {more})"


@line
def _truth(d: Drawing) -> str:
    a = d.pick()
    b = d.one_of(round(float(d.rng.normal()), 2), d.one_of("u", "x"))
    return f"{a} {d.one_of('>', '<=')} {b}" if a in ROWED else f"{a} > {round(float(d.rng.normal()), 2)}"


@line
def _of_truth(d: Drawing) -> str:
    a = d.pick("b", ranks=(0, 1, 2, 3))
    axes = d.axes(a) if d.rank(a) else []
    return d.one_of(f"tf.reduce_all({a}, {axes})", f"tf.reduce_any({a}, {axes})", f"tf.cast({a}, tf.float64)", f"~{a}")


@line
def _where(d: Drawing) -> str:
    a = d.pick("b")
    return f"tf.where({a}, {d.one_of(d.pick(), 'tf.zeros([], tf.float64)')}, {d.pick()})"


@line
def _count(d: Drawing) -> str:
    a = d.pick()
    return d.one_of(
        f"{a} / tf.cast(B, tf.float64)",
        f"{a} / tf.cast(tf.shape({a})[0], tf.float64)",
        f"{a} / (tf.cast(B, tf.float64) + 1.0)",
    )


@line
def _reshaped(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3, 4))
    last = d.shape(a)[0][-1]
    return d.one_of(
        f"tf.reshape({a}, [-1])",
        f"tf.reshape({a}, [-1, {last}])",
        f"tf.reshape({a}, [B, -1])",
        f"tf.reshape({a}, tf.concat([tf.shape({a})[:-1], [1, {last}]], 0))",
        f"tf.reshape({a}, [2, -1])",
        f"tf.expand_dims({a}, {d.axis(a, 1)})",
        f"tf.squeeze({a}[:, :1])",
        f"tf.reshape({a}, [B, 3, -1])",
    )


@line
def _moved(d: Drawing) -> str:
    a = d.pick(ranks=(2, 3, 4))
    return f"tf.transpose({a}, {[int(each) for each in d.rng.permutation(d.rank(a))]})"


@line
def _joined(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    b = d.one_of(d.pick(like=a), d.pick(ranks=(d.rank(a),)))
    function = d.one_of("concat", "stack")
    parts = ", ".join(d.rng.permutation([a, b, *d.one_of([], [a])]))
    return f"tf.{function}([{parts}], {d.axis(a, int(function == 'stack'))})"


@line
def _repeated(d: Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    times = [int(each) for each in d.rng.integers(1, 3, d.rank(a))]
    paddings = [[int(each) for each in pair] for pair in d.rng.integers(0, 2, (d.rank(a), 2))]
    return d.one_of(
        f"tf.tile({a}, {times})",
        f"tf.pad({a}, {paddings})",
        f"tf.repeat({a}, 2, {d.axis(a)})",
        f"tf.broadcast_to({a}, tf.concat([[2], tf.shape({a})], 0))",
        f"tf.concat([tf.ones([B, 4], tf.float64) * v, u], {d.one_of(0, 1)})",
    )


@line
def _losses(d: Drawing) -> str:
    a = d.one_of("u", d.pick(ranks=(2,)))
    b = d.pick(like=a)
    return d.one_of(
        f"tf.nn.sparse_softmax_cross_entropy_with_logits(y % 3, {a})",
        f"tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax({b}), {a})",
        f"tf.nn.sigmoid_cross_entropy_with_logits(tf.tanh({b}), {a})",
    )


@line
def _products(d: Drawing) -> str:
    a = d.pick(ranks=(2, 3, 4))
    b = d.one_of("w", d.pick(ranks=(2, 3)), d.pick(ranks=(d.rank(a),)), a)
    flags = d.one_of("", ", transpose_a=True", ", transpose_b=True")
    letters = "abcd"[: d.rank(a)]
    out = "".join(d.rng.permutation(list(letters))[: d.rng.integers(0, d.rank(a) + 1)])
    return d.one_of(
        f"tf.tensordot({a}, {b}, 1)",
        f"tf.einsum('{letters}->{out}', {a})",
        f"tf.matmul({a}, {b}{flags})",
        f"tf.einsum('{letters},{letters}->{out}', {a}, {a})",
        f"tf.einsum('...i,ij->...j', {a}, {b})",
        f"tf.nn.bias_add({a}, v)",
    )
