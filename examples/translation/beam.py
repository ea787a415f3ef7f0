"""Beam search in TensorFlow operations only, so that evaluation and exported graphs run the same code."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from translation.subwords import BEGIN, END, PADDING

State = dict[str, tf.Tensor]
Step = Callable[[tf.Tensor, tf.Tensor, State], tuple[tf.Tensor, State]]


def beam_search(step: Step, state: State, *, beam: int, longest: tf.Tensor, length_penalty: float = 0.6) -> tuple:
    """Returns the best sequence that a beam search finds for each row, and its score.

    Hypotheses are compared by their log probability over ((5 + length) / 6) ** length_penalty (Wu et al. 2016, arXiv
    1609.08144, equation 14). A hypothesis that has ended stays in the beam until enough others are better.

    Args:
        step: (ids [rows * beam], position, state) -> (logits [rows * beam, vocabulary], state); the hypotheses of a row
            are neighbours.
        state: the decoder's state before the first position. Axis 0 of each tensor is `rows`; other axes may grow.
        beam: hypotheses per row; 1 is greedy decoding.
        longest: the position at which the search ends: one number, or one for each row.
    Returns: ids [rows, <= longest] int32, padded after END; scores [rows] float32.
    """
    state = {name: tf.repeat(tensor, beam, axis=0) for name, tensor in state.items()}
    rows = tf.shape(next(iter(state.values())))[0] // beam
    longest = tf.broadcast_to(longest, [rows])
    # At first all hypotheses of a row are equal, so only one of them may have successors.
    total = tf.tile([[0.0] + [-1e9] * (beam - 1)], [rows, 1])
    start = {
        "ids": tf.fill([rows, beam, 1], BEGIN),
        "total": total,
        "length": tf.zeros([rows, beam]),
        "ended": tf.zeros([rows, beam], tf.bool),
        "state": state,
    }
    shapes = {
        "ids": tf.TensorShape([None, beam, None]),
        "total": tf.TensorShape([None, beam]),
        "length": tf.TensorShape([None, beam]),
        "ended": tf.TensorShape([None, beam]),
        "state": {name: tf.TensorShape([None] * tensor.shape.rank) for name, tensor in state.items()},
    }

    def is_unfinished(position: tf.Tensor, search: dict) -> tf.Tensor:
        return ~tf.reduce_all(search["ended"])

    def one_position(position: tf.Tensor, search: dict) -> tuple[tf.Tensor, dict]:
        logits, after = step(tf.reshape(search["ids"][:, :, -1], [-1]), position, search["state"])
        vocabulary = logits.shape[-1]
        log_probability = tf.reshape(tf.nn.log_softmax(tf.cast(logits, tf.float32)), [rows, beam, vocabulary])
        # Hypotheses that have ended continue with padding, which costs nothing.
        ended = search["ended"][:, :, tf.newaxis]
        is_padding = tf.range(vocabulary) == PADDING
        log_probability = tf.where(ended, tf.where(is_padding, 0.0, -1e9), log_probability)
        total = search["total"][:, :, tf.newaxis] + log_probability
        length = search["length"] + tf.cast(~search["ended"], tf.float32)
        score = total / _penalty(length, length_penalty)[:, :, tf.newaxis]
        _, best = tf.math.top_k(tf.reshape(score, [rows, beam * vocabulary]), beam)
        parent, new = best // vocabulary, best % vocabulary
        flat = tf.reshape(parent + beam * tf.range(rows)[:, tf.newaxis], [-1])
        ended = tf.gather(search["ended"], parent, batch_dims=1) | (new == END)
        ended |= (position + 1 >= longest)[:, tf.newaxis]
        ids = tf.concat([tf.gather(search["ids"], parent, batch_dims=1), new[:, :, tf.newaxis]], axis=2)
        return position + 1, {
            "ids": ids,
            "total": tf.gather(tf.reshape(total, [rows, beam * vocabulary]), best, batch_dims=1),
            "length": tf.gather(length, parent, batch_dims=1),
            "ended": ended,
            "state": {name: tf.gather(after[name], flat) for name in state},
        }

    _, found = tf.while_loop(is_unfinished, one_position, (tf.constant(0), start), (tf.TensorShape([]), shapes))
    # The hypotheses of a row are in the order of their scores.
    return found["ids"][:, 0, 1:], found["total"][:, 0] / _penalty(found["length"][:, 0], length_penalty)


def _penalty(length: tf.Tensor, power: float) -> tf.Tensor:
    return ((5.0 + length) / 6.0) ** power
