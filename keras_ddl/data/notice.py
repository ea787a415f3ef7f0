"""Tells all ranks which signal one rank has received, in the exchange that begins each step (data/order.py).

The signal needs no separate collective: a step sends one more number along with the number of rows. After the step
all ranks know the same signal. There is one pair of variables per process, because a signal is for the process.
"""

from __future__ import annotations

import functools

from keras_ddl.compat.strategies import process_variable
from keras_ddl.compat.tensorflow import tf

NONE = (0, 0)
_RANKS = 2**32  # a word is signal * _RANKS + rank, so that one maximum gives both


class _Words:
    """The variables of the process."""

    def __init__(self) -> None:
        self.own, self.agreed = process_variable("notice_own"), process_variable("notice_agreed")


@functools.cache
def _words() -> _Words:
    return _Words()


def prepare() -> None:
    """Makes the variables that the first step will use (order.prepare)."""
    _words()


def announce(number: int, rank: int) -> None:
    """Announces, from the next step on, that this rank has received signal `number`. Not while a step is traced."""
    _words().own.assign(number * _RANKS + rank)


def agreed() -> tuple[int, int]:
    """Returns (signal, rank), equal on all ranks, once a step has exchanged a signal; `NONE` before that."""
    return divmod(int(_words().agreed.numpy()), _RANKS)


def variables() -> list[tf.Variable]:
    return [_words().agreed]


def forget() -> None:
    """Forgets all signals. Call it on all ranks between steps."""
    if _words.cache_info().currsize:
        _words().own.assign(0)
        _words().agreed.assign(0)


def own() -> tf.Tensor:
    """Returns this rank's signal ([1] int64), for the exchange of a step."""
    return tf.reshape(_words().own.read_value(), [1])


def record(words: tf.Tensor) -> tf.Operation:
    """Returns an operation that stores the signals of all ranks ([ranks] int64) for `agreed`."""
    return _words().agreed.assign(tf.reduce_max(words))
