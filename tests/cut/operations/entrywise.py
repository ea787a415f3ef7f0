"""Operations entry by entry, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cut.operations import operands
from cut.operations.cases import case

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.specs import entrywise

raw = tf.raw_ops


def _operand(kind: str, x: Any) -> Any:
    if kind in operands.INTEGERS | operands.DIVISIONS:
        return tf.cast(tf.abs(x) * 4, tf.int32) + 1
    if kind in operands.BOOLS:
        return x > 0
    if kind in operands.POSITIVE:
        return tf.abs(x) + 1.5
    return tf.tanh(x) * 0.4 + 0.5 if kind in operands.SMALL else x


def _call(kind: str, *operands: Any) -> Any:
    names = list(getattr(raw, kind).__signature__.parameters)
    more = {"DstT": tf.float32} if kind == "Cast" else {}
    if "Tout" in names:
        more = {"Tout": tf.complex128 if kind == "Complex" else tf.float64}
    return getattr(raw, kind)(**dict(zip(names, operands)), **more)


def _unary(kind: str) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        value = tf.cast(x, tf.complex128) if kind in operands.COMPLEX else _operand(kind, x)
        found = [_call(kind, value)]
        if kind not in operands.BOOLS and value.dtype.is_floating:
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
        if kind not in operands.BOOLS:
            sums = [_operand(kind, tf.reduce_sum(x, 0)), _operand(kind, tf.reduce_max(x, 0)), tf.constant(_numbers(a))]
            found += [_call(kind, one, other) for one in sums for other in (*sums, a)]
        column = a[:, 0]
        return [*found, _call(kind, column[:, None], column), _call(kind, tf.transpose(a), b[:, 1])]

    return program


def _numbers(like: Any) -> np.ndarray:
    if like.dtype == tf.bool:
        return np.array([True, False, True])
    return np.array([1, 2, 3], like.dtype.as_numpy_dtype)


for _kind in entrywise.UNARY:
    case(_kind)(_unary(_kind))


for _kind in [*entrywise.BINARY, "AddN"]:
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


@case("ApproximateEqual", "Betainc", "ClipByValue")
def of_three(x: Any) -> Any:
    part = tf.sigmoid(x)
    found = [tf.math.betainc(part + 1, part * 2, part), raw.ApproximateEqual(x=x, y=x * 1.5, tolerance=0.3)]
    low, high = tf.constant(-0.5, x.dtype), tf.constant(0.5, x.dtype)
    return [*found, raw.ClipByValue(t=x, clip_value_min=low, clip_value_max=high)]
