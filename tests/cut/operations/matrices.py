"""Operations on vectors and matrices, each by itself, and complex numbers."""

from __future__ import annotations

from typing import Any

from cut.operations.cases import case, rows_of, with_gradients

from keras_ddl.compat.tensorflow import tf


def _positive(x: Any) -> Any:
    """Returns matrices [rows, 3, 3] that have an inverse."""
    factor = rows_of(x, 3, 3)
    return tf.matmul(factor, factor, transpose_b=True) + tf.eye(3, dtype=x.dtype)


@case("MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant", "Cholesky", "MatrixSolve", "MatrixTriangularSolve")
@case("MatrixBandPart", "MatrixDiagPartV3", "MatrixDiagV3")
def algebra(x: Any) -> Any:
    found = with_gradients(tf.linalg.inv, _positive(x)) + with_gradients(tf.linalg.det, _positive(x))
    found += with_gradients(tf.linalg.cholesky, _positive(x)) + [*tf.linalg.slogdet(_positive(x))]
    found += with_gradients(tf.linalg.solve, _positive(x), rows_of(x, 3, 2))
    found += with_gradients(tf.linalg.triangular_solve, _positive(x), rows_of(x, 3, 2))
    found += with_gradients(tf.linalg.diag_part, _positive(x)) + with_gradients(tf.linalg.diag, x)
    return [*found, tf.linalg.band_part(_positive(x), 0, 1), tf.linalg.band_part(x, 0, -1)]


@case("FFT", "IFFT", "FFT2D", "IFFT2D", "RFFT", "IRFFT", "RFFT2D", "IRFFT2D")
def transforms(x: Any) -> Any:
    signals = rows_of(x, 4, 8)
    found = [tf.signal.rfft(signals, [6])] + with_gradients(lambda v: tf.abs(tf.signal.rfft(v)) + 1.0, signals)
    numbers = tf.complex(signals, signals * 0.5 + 1)
    for name in ("fft", "ifft", "fft2d", "ifft2d", "irfft", "irfft2d"):
        function = getattr(tf.signal, name)
        found += [tf.math.real(function(numbers)), tf.abs(function(numbers))]
    return [*found, tf.math.imag(tf.signal.rfft2d(signals)), tf.math.angle(numbers), tf.signal.fft(numbers)]
