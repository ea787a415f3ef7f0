"""Complex numbers, counts, shapes, images, and matrices, as far as test_specs.py and rule_cases.py do not try them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cut.operations import operands
from cut.operations.cases import case, rows_of, with_gradients

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


def _positive(x: Any) -> Any:
    """Returns invertible matrices [rows, 3, 3]."""
    factor = rows_of(x, 3, 3)
    return tf.matmul(factor, factor, transpose_b=True) + tf.eye(3, dtype=x.dtype)


@case("Cholesky", "MatrixInverse", "MatrixTriangularSolve", "MatrixBandPart", "MatrixDiagPartV3", "MatrixDiagV3")
def algebra(x: Any) -> Any:
    found = with_gradients(tf.linalg.inv, _positive(x)) + with_gradients(tf.linalg.cholesky, _positive(x))
    found += with_gradients(tf.linalg.triangular_solve, _positive(x), rows_of(x, 3, 2))
    found += with_gradients(tf.linalg.diag_part, _positive(x)) + with_gradients(tf.linalg.diag, x)
    return [*found, tf.linalg.band_part(x, 0, -1)]


@case("FFT", "IFFT", "FFT2D", "IFFT2D", "RFFT", "IRFFT", "RFFT2D", "IRFFT2D")
def transforms(x: Any) -> Any:
    signals = rows_of(x, 4, 8)
    found = [tf.signal.rfft(signals, [6])] + with_gradients(lambda v: tf.abs(tf.signal.rfft(v)) + 1.0, signals)
    numbers = tf.complex(signals, signals * 0.5 + 1)
    for name in ("fft", "ifft", "fft2d", "ifft2d", "irfft", "irfft2d"):
        function = getattr(tf.signal, name)
        found += [tf.math.real(function(numbers)), tf.abs(function(numbers))]
    return [*found, tf.math.imag(tf.signal.rfft2d(signals)), tf.math.angle(numbers), tf.signal.fft(numbers)]
