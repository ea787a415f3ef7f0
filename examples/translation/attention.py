"""Attention: for each position of a query, an average over the positions of a memory, weighted by how well they match.

A separate method projects the memory, so that inference does it once per sentence and not for each word.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

Tensor = Any
Projected = tuple[Tensor, Tensor]


def masked_softmax(scores: Tensor, keep: Tensor) -> Tensor:
    """Returns the softmax over the last axis of `scores` among the positions where `keep` is true (broadcast)."""
    least = -1e4 if scores.dtype == "float16" else -1e9  # the largest float16 is 65504
    return tf.nn.softmax(ops.where(keep, scores, ops.cast(least, scores.dtype)))


class LuongAttention(keras.layers.Layer):
    """Global attention with the "general" score (Luong, Pham and Manning, EMNLP 2015, arXiv 1508.04025, section 3.1):

        score(query, memory) = query^T W memory        vector = tanh(V [context; query])

    The vector is not part of the next position's input, so training computes all positions of a target in one product
    of matrices.
    """

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.score = keras.layers.Dense(units, use_bias=False, name="score")
        self.combine = keras.layers.Dense(units, use_bias=False, activation="tanh", name="combine")

    def project(self, memory: Tensor) -> Projected:
        """Returns (keys, values) of a memory [rows, m, units], each [rows, m, units]."""
        return self.score(memory), memory

    def call(self, query: Tensor, projected: Projected, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the attention vectors [rows, q, units] and the weights [rows, q, m].

        Args:
            query: [rows, q, units]. projected: the result of `project`. keep: [rows, 1 or q, m], false for positions to
                ignore.
        """
        keys, values = projected
        weights = masked_softmax(ops.matmul(query, ops.transpose(keys, (0, 2, 1))), keep)
        context = ops.matmul(weights, values)
        return self.combine(ops.concatenate([context, query], axis=-1)), weights


class MultiHeadAttention(keras.layers.Layer):
    """Scaled dot-product attention in several heads (Vaswani et al. 2017, arXiv 1706.03762, section 3.2).

    Keras's own layer projects the memory in each call; this one lets inference keep what it has projected.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads. Received: width={width}, heads={heads}.")
        self.width, self.heads = width, heads
        self.query, self.key, self.value, self.output_projection = (
            keras.layers.Dense(width, use_bias=False, name=name) for name in ("query", "key", "value", "output")
        )
        self.dropout = keras.layers.Dropout(dropout)

    def project(self, memory: Tensor) -> Projected:
        """Returns (keys, values) of a memory [rows, m, width], each [rows, heads, m, width / heads]."""
        return self._split(self.key(memory)), self._split(self.value(memory))

    def call(
        self, query: Tensor, projected: Projected, keep: Tensor | None = None, training: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns the answers [rows, q, width] and the weights [rows, heads, q, m].

        Args:
            query: [rows, q, width]. projected: the result of `project`.
            keep: [rows, 1 or q, m], false for positions to ignore; None: all positions see all.
        """
        keys, values = projected
        scale = (self.width // self.heads) ** -0.5
        scores = ops.matmul(self._split(self.query(query) * scale), ops.transpose(keys, (0, 1, 3, 2)))
        weights = tf.nn.softmax(scores) if keep is None else masked_softmax(scores, ops.expand_dims(keep, 1))
        answers = ops.transpose(ops.matmul(self.dropout(weights, training=training), values), (0, 2, 1, 3))
        return self.output_projection(ops.reshape(answers, (*ops.shape(query)[:2], self.width))), weights

    def _split(self, projected: Tensor) -> Tensor:
        rows, positions, _ = ops.shape(projected)
        split = ops.reshape(projected, (rows, positions, self.heads, self.width // self.heads))
        return ops.transpose(split, (0, 2, 1, 3))
