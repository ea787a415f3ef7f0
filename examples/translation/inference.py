"""Inference: the graph that translates with the weights of the model in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from translation.beam import beam_search
from translation.subwords import END, PADDING, Subwords

Model = Any  # a Transformer, or an LSTMTranslator


def translated(
    model: Model, source: tf.Tensor, *, beam: int = 4, longest: int = 128, length_penalty: float = 0.6
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the translation of source [rows, w], as ids [rows, <= longest] int32 padded after END, and its score.

    It uses plain TensorFlow operations, so that it can be called in a tf.function and exported. The score is a log
    probability over a length penalty (beam.py). A translation has at most twice the subwords of its source plus ten,
    and no more than the model has positions.
    """
    memory = model.encode(source)
    start = model.start(memory)
    shapes = {name: tensor.shape for name, tensor in start.items()}
    memory = {name: tf.repeat(tensor, beam, axis=0) for name, tensor in memory.items()}

    def step(ids: tf.Tensor, position: tf.Tensor, state: dict[str, tf.Tensor]) -> tuple[tf.Tensor, dict]:
        for name, tensor in state.items():
            # A loop forgets the shapes of tensors that grow.
            tensor.set_shape([None, *(size or None for size in shapes[name][1:])])
        return model.step(ids, position, memory, state)

    lengths = tf.reduce_sum(tf.cast(source != PADDING, tf.int32), 1)
    bound = tf.minimum(2 * lengths + 10, min(longest, getattr(model, "longest", longest)))
    return beam_search(step, start, beam=beam, longest=bound, length_penalty=length_penalty)


class Translator:
    """Translates sentences with a model and its subwords. The model may be in training.

    Args:
        beam, length_penalty: as for `translated`. rows: sentences that are translated at once.
        longest: limit of the subwords of a translation, and of a sentence, of which only the first are translated.
    """

    def __init__(
        self, model: Model, subwords: Subwords, *, rows: int = 128, longest: int = 128, **options: Any
    ) -> None:
        self.subwords, self.rows, self.longest = subwords, rows, longest
        self._graph = tf.function(
            lambda source: translated(model, source, longest=longest, **options)[0],
            input_signature=[tf.TensorSpec([None, None], tf.int32)],
        )

    def __call__(self, sentences: Sequence[str]) -> list[str]:
        """Returns the translations, in order. The translation of an empty sentence is empty."""
        encoded = [[*ids[: self.longest], END] for ids in self.subwords.encode(sentences)]
        answers: list[str] = [""] * len(encoded)
        not_empty = [number for number, ids in enumerate(encoded) if ids != [END]]
        by_length = sorted(not_empty, key=lambda number: len(encoded[number]))  # needs less padding
        for first in range(0, len(by_length), self.rows):
            chosen = by_length[first : first + self.rows]
            source = np.full([len(chosen), max(len(encoded[number]) for number in chosen)], PADDING, np.int32)
            for row, number in enumerate(chosen):
                source[row, : len(encoded[number])] = encoded[number]
            for number, answer in zip(chosen, self.subwords.decode(self._graph(source).numpy())):
                answers[number] = answer
        return answers
