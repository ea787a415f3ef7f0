"""Random small programs, drawn by seed: lines of Python, so that a failure can be read and run again.

A line is taken if it runs at all batch sizes that the program is to be tried with; the shapes it gives there tell which
lines may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf

# Names of the arguments: rows along axis 0, and what every rank has all of.
ROWED = ("x", "u", "y")
WHOLES = ("w", "v", "table")
_MOST_ENTRIES = 3000


def arguments(seed: int, rows: int) -> list[np.ndarray]:
    """Returns x [rows, 3, 4], u [rows, 4] and y [rows] (classes 0 to 3)."""
    rng = np.random.default_rng([seed, rows])
    return [rng.normal(size=(rows, 3, 4)), rng.normal(size=(rows, 4)), rng.integers(0, 4, rows)]


def wholes(seed: int) -> list[np.ndarray]:
    """Returns w [4, 5], v [4] and table [4, 3]."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in ((4, 5), (4,), (4, 3))]


@dataclass
class Program:
    """Lines that set v0, v1, ... `batches`: numbers of rows to try; the first is the one that is traced."""

    seed: int
    static: bool
    batches: tuple[int, ...]
    lines: list[str]
    results: list[str]

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}, static={self.static}, batches {self.batches}:", *self.source()])

    def source(self) -> list[str]:
        """Returns the program as lines: values, a loss of them, and its gradients."""
        floats = ", ".join(self.results)
        return [
            "B = tf.shape(x)[0]" if not self.static else "B = x.shape[0]",
            "with tf.GradientTape() as tape:",
            "    tape.watch([x, u, w, v, table])",
            *(f"    {line}" for line in self.lines),
            f"    loss = sum(tf.reduce_sum(tf.tanh(tf.cast(each, tf.float64)) / 3.0) for each in [{floats}])",
            "found = tape.gradient(loss, [x, u, w, v, table], unconnected_gradients='zero')",
        ]

    def __call__(self, *given: Any) -> list[Any]:
        space = {"tf": tf, **dict(zip((*ROWED, *WHOLES), given))}
        exec("\n".join(self.source()), space)
        values = [space[f"v{i}"] for i in range(len(self.lines))]
        return [*values, space["loss"], *map(tf.convert_to_tensor, space["found"])]


class _Drawing:
    """One program being drawn: its values at each number of rows."""

    def __init__(self, seed: int, static: bool, batches: Sequence[int]) -> None:
        self.rng = np.random.default_rng(seed)
        self.spaces = []
        for rows in batches:
            given = map(tf.constant, [*arguments(seed, rows), *wholes(seed)])
            self.spaces.append({"tf": tf, "B": rows, **dict(zip((*ROWED, *WHOLES), given))})
        self.lines: list[str] = []
        self.names = [*ROWED, "w", "v"]

    def take(self, expression: str) -> bool:
        """Adds a line, if it runs and gives numbers of a moderate size."""
        name = f"v{len(self.lines)}"
        found = []
        for space in self.spaces:
            try:
                value = eval(expression, space)
            except (ValueError, TypeError, tf.errors.OpError):
                return False
            if not isinstance(value, tf.Tensor) or tf.size(value) > _MOST_ENTRIES or value.dtype == tf.float32:
                return False
            if value.dtype.is_floating and np.max(np.abs(np.nan_to_num(value, posinf=1e9)), initial=0) > 1e6:
                return False
            found.append(value)
        if len({len(value.shape) for value in found}) != 1:
            return False
        for space, value in zip(self.spaces, found):
            space[name] = value
        self.lines.append(f"{name} = {expression}")
        self.names += [name, name, name]  # what is new is taken up sooner
        return True

    def shape(self, name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(space[name].shape) for space in self.spaces)

    def rank(self, name: str) -> int:
        return len(self.spaces[0][name].shape)

    def pick(self, kind: str = "f", ranks: Sequence[int] = (0, 1, 2, 3, 4), like: str | None = None) -> str:
        """Returns the name of a float (f), integer (i) or boolean (b) tensor. Raises: LookupError: there is none."""
        fitting = []
        for name in self.names:
            dtype = self.spaces[0][name].dtype
            is_kind = {"f": dtype.is_floating, "i": dtype.is_integer, "b": dtype == tf.bool}[kind]
            if is_kind and self.rank(name) in ranks and (like is None or self.shape(name) == self.shape(like)):
                fitting.append(name)
        if not fitting:
            raise LookupError(kind)
        return str(self.rng.choice(fitting))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def axis(self, name: str, more: int = 0) -> int:
        rank = self.rank(name) + more
        return int(self.rng.integers(-rank, rank))

    def axes(self, name: str) -> list[int]:
        rank = self.rank(name)
        return sorted(int(each) for each in self.rng.choice(rank, self.rng.integers(1, rank + 1), replace=False))


_LINES: list[Callable[[_Drawing], str]] = []


def _line(function: Callable[[_Drawing], str]) -> Callable[[_Drawing], str]:
    _LINES.append(function)
    return function


@_line
def _entry_by_entry(d: _Drawing) -> str:
    a = d.pick()
    return d.one_of(
        f"tf.tanh({a})", f"tf.nn.relu({a})", f"tf.exp(-tf.square({a}))", f"-{a}", f"tf.sqrt(tf.abs({a}) + 1.0)"
    )


@_line
def _two(d: _Drawing) -> str:
    a = d.pick()
    b = d.one_of(d.pick(like=a), d.pick(), d.pick())
    return d.one_of(f"{a} + {b}", f"{a} - {b}", f"{a} * {b}", f"{a} / (1.5 + tf.abs({b}))")


@_line
def _two_by_name(d: _Drawing) -> str:
    a, b = d.pick(), d.pick()
    return f"tf.{d.one_of('maximum', 'minimum', 'math.squared_difference', 'math.divide_no_nan')}({a}, {b})"


@_line
def _pairs(d: _Drawing) -> str:
    a = d.pick(ranks=(1, 2))
    return d.one_of(f"{a}[:, None] - {a}", f"tf.abs({a}[None] - {a}[:, None])", f"{a}[..., None] * {a}[:, None]")


@_line
def _reduced(d: _Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3, 4))
    name = d.one_of("sum", "sum", "mean", "mean", "max", "min", "prod", "logsumexp", "std", "variance")
    function = f"math.reduce_{name}" if name in ("std", "variance") else f"reduce_{name}"
    operand = f"tf.tanh({a})" if name == "prod" else f"1.0 + tf.square({a})" if name == "std" else a
    return f"tf.{function}({operand}, {d.axes(a)}, keepdims={d.one_of(True, False)})"


@_line
def _truth(d: _Drawing) -> str:
    a = d.pick()
    b = d.one_of(round(float(d.rng.normal()), 2), d.one_of("u", "x"))
    return f"{a} {d.one_of('>', '<=')} {b}" if a in ROWED else f"{a} > {round(float(d.rng.normal()), 2)}"


@_line
def _of_truth(d: _Drawing) -> str:
    a = d.pick("b", ranks=(0, 1, 2, 3))
    axes = d.axes(a) if d.rank(a) else []
    return d.one_of(f"tf.reduce_all({a}, {axes})", f"tf.reduce_any({a}, {axes})", f"tf.cast({a}, tf.float64)", f"~{a}")


@_line
def _where(d: _Drawing) -> str:
    a = d.pick("b")
    return f"tf.where({a}, {d.one_of(d.pick(), 'tf.zeros([], tf.float64)')}, {d.pick()})"


@_line
def _count(d: _Drawing) -> str:
    a = d.pick()
    return d.one_of(
        f"{a} / tf.cast(B, tf.float64)",
        f"{a} / tf.cast(tf.shape({a})[0], tf.float64)",
        f"{a} * (1 / tf.cast(B * 2, tf.float64))",
        f"{a} / tf.cast(tf.size({a}), tf.float64)",
        f"{a} / tf.cast(B * B, tf.float64)",
        f"{a} / (tf.cast(B, tf.float64) + 1.0)",
    )


@_line
def _reshaped(d: _Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3, 4))
    last = d.shape(a)[0][-1]
    return d.one_of(
        f"tf.reshape({a}, [-1])",
        f"tf.reshape({a}, [-1, {last}])",
        f"tf.reshape({a}, [B, -1])",
        f"tf.reshape({a}, [-1, B])",
        f"tf.reshape({a}, tf.concat([tf.shape({a})[:-1], [1, {last}]], 0))",
        f"tf.reshape({a}, [2, -1])",
        f"tf.reshape({a}, [-1, 2])",
        f"tf.expand_dims({a}, {d.axis(a, 1)})",
        f"tf.squeeze({a}[:, :1])",
        f"tf.reshape({a}, [B, 3, -1])",
        f"tf.reshape({a}, [3, B, -1])",
    )


@_line
def _moved(d: _Drawing) -> str:
    a = d.pick(ranks=(2, 3, 4))
    return f"tf.transpose({a}, {[int(each) for each in d.rng.permutation(d.rank(a))]})"


@_line
def _cut_out(d: _Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3, 4))
    part = d.one_of("1:", ":-1", "::2", "::-1", "0", "-1", ":1", "B:", ":B", "2 * B:", ":2", "1::2", "None, :")
    return f"{a}[{d.one_of('', '', ':, ', '..., ')}{part}]"


@_line
def _joined(d: _Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    b = d.one_of(d.pick(like=a), d.pick(ranks=(d.rank(a),)))
    function = d.one_of("concat", "stack")
    parts = ", ".join(d.rng.permutation([a, b, *d.one_of([], [a])]))
    return f"tf.{function}([{parts}], {d.axis(a, int(function == 'stack'))})"


@_line
def _parted(d: _Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    axis, count = d.axis(a), int(d.rng.integers(2, 4))
    if len({shape[-1] for shape in d.shape(a)}) != 1:
        raise LookupError("an axis of known length")
    return d.one_of(f"tf.split({a}, {count}, {axis})[{d.one_of(0, -1)}]", f"tf.unstack({a}, axis=-1)[0]")


@_line
def _repeated(d: _Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    times = [int(each) for each in d.rng.integers(1, 3, d.rank(a))]
    paddings = [[int(each) for each in pair] for pair in d.rng.integers(0, 2, (d.rank(a), 2))]
    return d.one_of(
        f"tf.tile({a}, {times})",
        f"tf.pad({a}, {paddings})",
        f"tf.repeat({a}, 2, {d.axis(a)})",
        f"tf.roll({a}, 1, {d.axis(a)})",
        f"tf.reverse({a}, [{d.axis(a)}])",
        f"tf.broadcast_to({a}, tf.concat([[2], tf.shape({a})], 0))",
        f"tf.concat([tf.ones([B, 4], tf.float64) * v, u], {d.one_of(0, 1)})",
        f"tf.fill([B], tf.reduce_sum({a}))",
    )


@_line
def _looked_up(d: _Drawing) -> str:
    a, i = d.pick(ranks=(1, 2, 3)), d.pick("i", ranks=(1, 2))
    return d.one_of(
        f"tf.gather(table, {i} % 4)",
        f"tf.gather({a}, [0, 0])",
        f"tf.gather({a}, {i} % 2, axis=-1)",
        f"tf.one_hot({i} % 5, 4, dtype=tf.float64)",
        f"tf.one_hot({i} % 5, 4, axis=0, dtype=tf.float64)",
        f"tf.math.unsorted_segment_sum({a}, y, 4)",
        f"tf.gather({a}, y % 3, axis=1, batch_dims=1)",
        f"tf.math.unsorted_segment_max(tf.tanh({a}), y, 4)",
        f"tf.gather({a}, tf.argsort(y, stable=True))",
        f"tf.math.unsorted_segment_mean({a}, y, 3)",
    )


@_line
def _ordered(d: _Drawing) -> str:
    a = d.pick(ranks=(1, 2, 3))
    return d.one_of(
        f"tf.sort({a}, {d.axis(a)})",
        f"tf.math.top_k({a}, 1).values",
        f"tf.cumsum({a}, {d.axis(a)})",
        f"tf.math.cumprod(tf.tanh({a}), {d.axis(a)})",
        f"tf.nn.softmax({a}, {d.axis(a)})",
        f"tf.nn.log_softmax({a})",
        f"tf.math.l2_normalize({a} + 3.0, {d.axis(a)})",
        f"tf.nn.l2_loss({a})",
        f"tf.argmax({d.one_of('x', 'u')}, {d.one_of(0, 1, -1)})",
    )


@_line
def _losses(d: _Drawing) -> str:
    a = d.one_of("u", d.pick(ranks=(2,)))
    b = d.pick(like=a)
    return d.one_of(
        f"tf.nn.sparse_softmax_cross_entropy_with_logits(y % 3, {a})",
        f"tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax({b}), {a})",
        f"tf.nn.sigmoid_cross_entropy_with_logits(tf.tanh({b}), {a})",
        f"tf.math.square({a} - tf.stop_gradient({b}))",
    )


@_line
def _products(d: _Drawing) -> str:
    a = d.pick(ranks=(2, 3, 4))
    b = d.one_of("w", d.pick(ranks=(2, 3)), d.pick(ranks=(d.rank(a),)), a)
    flags = d.one_of("", ", transpose_a=True", ", transpose_b=True")
    letters = "abcd"[: d.rank(a)]
    out = "".join(d.rng.permutation(list(letters))[: d.rng.integers(0, d.rank(a) + 1)])
    return d.one_of(
        f"tf.matmul({a}, {b}{flags})",
        f"tf.tensordot({a}, {b}, 1)",
        f"tf.einsum('{letters}->{out}', {a})",
        f"tf.matmul({a}, {b}{flags})",
        f"tf.einsum('{letters},{letters}->{out}', {a}, {a})",
        f"tf.einsum('...i,ij->...j', {a}, {b})",
        f"tf.nn.bias_add({a}, v)",
    )


@_line
def _images(d: _Drawing) -> str:
    a = d.one_of("x", d.pick(ranks=(3,)))
    return d.one_of(
        f"tf.nn.conv1d({a}, tf.reshape(w, [1, 4, 5]), 1, 'SAME')",
        f"tf.nn.max_pool1d({a}, 2, 1, 'SAME')",
        f"tf.nn.avg_pool1d({a}, 2, 1, 'SAME')",
        f"tf.nn.conv2d({a}[..., None], tf.reshape(w, [2, 2, 1, 5]), 1, 'SAME')",
        f"tf.nn.depthwise_conv2d({a}[..., None], tf.reshape(w, [2, 2, 1, 5]), [1] * 4, 'SAME')",
    )


@_line
def _integers(d: _Drawing) -> str:
    i = d.pick("i")
    j = d.one_of(d.pick("i"), 3)
    return d.one_of(
        f"{i} + tf.cast({j}, {i}.dtype)",
        f"{i} * tf.cast({j}, {i}.dtype)",
        f"tf.cast({i}, tf.float64) / 5.0",
        f"{i} // 2",
        f"tf.reduce_sum({i})",
        "tf.range(B)",
        f"tf.cast(tf.floor({d.pick(like='u')} * 3.3), tf.int32)",
        f"tf.reduce_max({i})",
        f"tf.shape({d.pick()})",
        f"tf.cumsum(y) - {i} % 2",
        f"tf.cast({i}, tf.int32)",
        "tf.cast(tf.range(B), tf.float64) / 7.0",
        f"tf.reduce_prod({i} % 3)",
    )


def draw(seed: int, lines: int = 6) -> Program:
    """Returns the program of a seed. Programs of even seeds are static: they are traced for one number of rows."""
    static = seed % 2 == 0
    batches: tuple[int, ...] = ((4, 5, 3, 1, 6)[seed // 2 % 5],) if static else (5, 1, 2, 7)
    drawing = _Drawing(seed, static, batches)
    for _ in range(40 * lines):
        if len(drawing.lines) == lines:
            break
        try:
            drawing.take(drawing.one_of(*_LINES)(drawing))
        except LookupError:
            continue
    results = [f"v{i}" for i in range(len(drawing.lines)) if drawing.spaces[0][f"v{i}"].dtype.is_floating]
    return Program(seed, static, batches, drawing.lines, results or ["u"])
