"""Patches of Keras's random numbers: in a step, a rank's rows of those that one process would have drawn.

Patched: keras/src/backend/tensorflow/random.py and image.py (3.15.1). They draw with `tf.random.stateless_*` and
`tf.nn.experimental.stateless_dropout` from seeds that all ranks share, so what they know as `tf` is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import random_rows
from keras_ddl.strategy.row_share import RowShare
from keras_ddl.strategy.thread_value import ThreadValue

_draws_rows = ThreadValue(True)  # whether draws may be of rows, or are certainly of none


def tensorflow(original: Any) -> Any:
    """What draws rows is replaced, everything else is TensorFlow."""
    return _Tensorflow(original)


def shuffle(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rows stay on their ranks: shuffling a batch's rows permutes those of each rank, which a warning says once."""

    def wrapper(x, axis=0, seed=None):
        if _share() is None:
            return original(x, axis=axis, seed=seed)
        with _draws_rows.set_to(axis == 0):
            if axis == 0:
                random_rows.warn_once(
                    "shuffle",
                    "keras.random.shuffle in a step permutes the rows that this rank holds among themselves, where one "
                    "process would permute those of the whole batch. Shuffle in the data, or use keras_ddl.all_gather "
                    "first, if results must equal those of one process.",
                )
            return original(x, axis=axis, seed=seed)

    return wrapper


def _share() -> RowShare | None:
    """The rows of the step that runs, if other ranks run it, too."""
    strategy = keras_compat.replica_strategy()
    if strategy is None or not strategy.extended.counts_rows or not _draws_rows.get():
        return None
    return strategy.extended.share


class _Overlay:
    """A namespace, part of which is replaced."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Random(_Overlay):
    def stateless_normal(self, shape, seed, mean=0.0, stddev=1.0, dtype=tf.float32):
        share = _share()
        if share is None:
            return self._original.stateless_normal(shape, seed=seed, mean=mean, stddev=stddev, dtype=dtype)
        return random_rows.normal(share, shape, seed, mean, stddev, dtype)

    def stateless_uniform(self, shape, seed, minval=0, maxval=None, dtype=tf.float32):
        share = _share()
        if share is None or minval is None:
            return self._original.stateless_uniform(shape, seed=seed, minval=minval, maxval=maxval, dtype=dtype)
        return random_rows.uniform(share, shape, seed, minval, maxval, dtype)

    def stateless_truncated_normal(self, shape, **arguments):
        def draw(shape):
            return self._original.stateless_truncated_normal(shape, **arguments)

        return self._whole(draw, shape)

    def stateless_gamma(self, shape, alpha, **arguments):
        alpha = tf.convert_to_tensor(alpha, arguments.get("dtype"))

        def draw(shape, alpha):
            return self._original.stateless_gamma(shape, alpha=alpha, **arguments)

        return self._whole(draw, shape, alpha)

    def stateless_binomial(self, shape, counts, probs, **arguments):
        def draw(shape, counts, probs):
            return self._original.stateless_binomial(shape, counts=counts, probs=probs, **arguments)

        return self._whole(draw, shape, counts, probs)

    def stateless_categorical(self, logits, num_samples, **arguments):
        logits = tf.convert_to_tensor(logits)

        def draw(shape, logits):
            return self._original.stateless_categorical(logits, num_samples, **arguments)

        return self._whole(draw, [tf.shape(logits)[0], num_samples], logits)

    def _whole(self, draw: Callable[..., tf.Tensor], shape: Any, *by_row: Any) -> tf.Tensor:
        share = _share()
        return draw(shape, *by_row) if share is None else random_rows.whole_then_rows(share, draw, shape, by_row)


class _Experimental(_Overlay):
    def stateless_dropout(self, x, rate, seed, **arguments):
        share = _share()
        if share is None:
            return self._original.stateless_dropout(x, rate=rate, seed=seed, **arguments)
        return random_rows.dropout(share, x, rate, seed, **arguments)


class _Nn(_Overlay):
    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.experimental = _Experimental(original.experimental)


class _Tensorflow(_Overlay):
    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.random = _Random(original.random)
        self.nn = _Nn(original.nn)
