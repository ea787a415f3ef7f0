"""The exported signatures: `translate`, from strings to strings, and `serving_default`, which gives logits.

    base = keras_ddl.export.write_base_graph(model, directory, **for_export(model, subwords, phrases))

The graph contains the subwords (text.py) and the beam search (inference.py), so it needs no Python, no sentencepiece
and no other file. Any server of TensorFlow's SavedModels can run it:

    keras-ddl serve translation-output/saved_model
    curl -d '{"signature_name": "translate", "inputs": ["the third of May"]}' localhost:8501/v1/models/model:predict
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_ddl import export
from translation.inference import Model, translated
from translation.subwords import BEGIN, PADDING, Subwords
from translation.text import GraphSubwords

_BYTES = 16  # bytes that a sentence's subwords may have on average


def for_export(
    model: Model, subwords: Subwords, phrases: Sequence[str], *, longest: int = 128, **options: Any
) -> dict[str, Any]:
    """Returns the arguments of `write_base_graph` or `callbacks.ExportBase` to export a model that translates.

    Args:
        phrases: sentences. Every export must translate the first four that are short enough as the model did in
            training.
        longest, options: as for `translate`.
    """
    fits = [
        text
        for text, ids in zip(phrases, subwords.encode(phrases))
        if 0 < len(ids) <= longest and len(text.encode()) <= _BYTES * longest
    ]
    chosen = fits[:4] or [""]
    source = GraphSubwords(subwords).encode(tf.constant(chosen))
    rows = {"source": source, "target": tf.concat([tf.fill([len(chosen), 1], BEGIN), source[:, :-1]], 1)}
    function = translate(model, subwords, longest=longest, **options)
    return {
        "input_signature": {name: tf.TensorSpec([None, None], tf.int32, name) for name in rows},
        "sample": {name: ids.numpy() for name, ids in rows.items()},
        "signatures": {"translate": export.Function(function, {"text": chosen})},
    }


def translate(
    model: Model, subwords: Subwords, *, longest: int = 128, **options: Any
) -> Callable[..., dict[str, tf.Tensor]]:
    """Returns a function of text [n], sentences in UTF-8 in the Unicode form of the corpus (NFC).

    It returns `translation` [n] and `score` [n], the log probability over a length penalty (beam.py), at best 0. An
    empty sentence stays empty. If a sentence is too long, none is translated: INVALID_ARGUMENT.

    Args:
        longest: limit of the subwords of a sentence, as in training, and of its translation.
        options: as for `translated`.
    """
    cut = GraphSubwords(subwords)

    # A tf.function, because a checkpoint also calls it eagerly to compare.
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")], autograph=False)
    def function(text: tf.Tensor) -> dict[str, tf.Tensor]:
        # Checked by bytes first, because cutting takes the square of a word's length.
        text = _checked(text, tf.strings.length(text), _BYTES * longest, "bytes")
        source = cut.encode(text)
        lengths = tf.reduce_sum(tf.cast(source != PADDING, tf.int32), 1) - 1  # without END
        source = _checked(source, lengths, longest, "subwords")
        ids, score = translated(model, source, longest=longest, **options)
        is_empty = lengths == 0
        return {
            "translation": tf.where(is_empty, "", cut.decode(ids)),
            "score": tf.where(is_empty, 0.0, score),
        }

    return function


def _checked(tensor: tf.Tensor, lengths: tf.Tensor, most: int, unit: str) -> tf.Tensor:
    longest = tf.reduce_max(tf.concat([lengths, [0]], 0))
    refusal = tf.debugging.Assert(longest <= most, [f"A sentence has at most {most} {unit}. Received:", longest])
    with tf.control_dependencies([refusal]):
        return tf.identity(tensor)
