"""Complex numbers, counts, shapes, images: what test_specs.py and rule_cases.py do not try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cut.operations import operands
from cut.operations.cases import case, rows_of

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops


def _of_complex_numbers(kind: str) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        value = tf.cast(x, tf.complex128)
        more = {"Tout": tf.float64} if kind != "Conj" else {}
        name = next(iter(getattr(raw, kind).__signature__.parameters))
        found = [getattr(raw, kind)(**{name: each}, **more) for each in (value, tf.transpose(value))]
        return [tf.math.real(each) if each.dtype.is_complex else each for each in found]

    return program


for _kind in sorted(operands.COMPLEX):
    case(_kind)(_of_complex_numbers(_kind))


@case("Mul", "RealDiv")
def counts_that_are_infinite(x: Any) -> Any:
    s, count = tf.reduce_sum(x, 0), tf.shape(x)[0] * 70000
    found = [s * tf.cast(tf.cast(count, tf.float16), tf.float64), s * tf.cast(count, tf.float64)]
    return [*found, s / tf.cast(count, tf.float64)]


@case("ShapeN", "Fill")
def shapes(x: Any) -> Any:
    rows, s = tf.shape(x)[0], tf.reduce_sum(x, 0)
    ones = tf.fill([rows, 3], tf.constant(2.0, tf.float64))
    found = [tf.fill([rows, 3], tf.reduce_sum(x)) * x, tf.fill([rows], 2.0), tf.concat([ones * 3, x], 1)]
    return [*found, *raw.ShapeN(input=[x, tf.transpose(x), s])]


@case("MaxPoolGradGrad")
def second_gradient_of_a_pool(x: Any) -> Any:
    images = rows_of(x, 4, 4, 2)
    out = tf.nn.max_pool2d(images, 2, 2, "VALID")
    numbers = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    return [raw.MaxPoolGradGrad(orig_input=images, orig_output=out, grad=images * 2, **numbers)]
