"""The loss of translation: the mean over the tokens of all ranks, without padding."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from translation.subwords import PADDING

Tensor = Any


@keras.saving.register_keras_serializable(package="translation")
class TokenCrossentropy(keras.losses.Loss):
    """Cross-entropy of the next subword, in nats per token.

    Args:
        smoothing: label smoothing (Szegedy et al. 2016, arXiv 1512.00567): this share of each label is spread evenly
            over the vocabulary.
    """

    def __init__(self, smoothing: float = 0.0, name: str = "token_crossentropy", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.smoothing = smoothing

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Returns a scalar, from labels [rows, v] and logits [rows, v, vocabulary].

        Each rank weighs as much as its number of tokens, because the Strategy sees that both sums are over rows.
        """
        labels = ops.cast(y_true, "int32")
        kept = ops.cast(labels != PADDING, y_pred.dtype)
        right = ops.take_along_axis(y_pred, ops.expand_dims(labels, -1), axis=-1)[..., 0]
        expected = (1 - self.smoothing) * right
        if self.smoothing:
            expected = expected + self.smoothing * ops.mean(y_pred, axis=-1)
        losses = ops.logsumexp(y_pred, axis=-1) - expected
        return ops.sum(losses * kept) / ops.sum(kept)

    def get_config(self) -> dict[str, Any]:
        return {"smoothing": self.smoothing, "name": self.name}
