"""Subwords in a graph: does in TensorFlow operations, from strings to strings, what `Subwords` does in Python.

A served model takes and returns text, and a server runs no Python. This module applies the rule of `Subwords.pieces` to
all words at once. Pairs are looked up in sorted constants, so that no tables have to be saved with the graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from translation.subwords import END, PADDING, UNKNOWN, Subwords

_SPACE = "▁"  # U+2581, the first character of words
_UNKNOWN_TEXT = " ⁇ "  # sentencepiece's text for UNKNOWN


class GraphSubwords:
    """Cuts sentences into subwords, as ids, and joins them again; eagerly or in a tf.function.

    The results are sentencepiece's. Spaces (U+0020) around a sentence, and all but one between words, are removed.
    TensorFlow does not know Unicode forms: a character in another form than the corpus's, such as "u" and a combining
    diaeresis for "ü", is UNKNOWN. So the caller must normalize the text (unicodedata.normalize("NFC", text)).
    """

    def __init__(self, subwords: Subwords) -> None:
        """Raises: ValueError: some subwords hold a space after other characters."""
        pieces = {piece: number for number, (piece, _) in enumerate(subwords.pieces) if number > END}
        beyond = [piece for piece in pieces if _SPACE in piece[1:]]
        if beyond:
            raise ValueError(
                "Each word is cut separately, so a subword may only have a space at its beginning. Received: "
                f"{beyond[:5]}. Train with sentencepiece's split_by_whitespace."
            )
        marks = dict.fromkeys(range(END + 1), "") | {UNKNOWN: _UNKNOWN_TEXT}
        self._texts = [marks.get(number, piece) for number, (piece, _) in enumerate(subwords.pieces)]
        self._scores = np.array([score for _, score in subwords.pieces], np.float32)
        self._characters = _Lookup({ord(piece): number for piece, number in pieces.items() if len(piece) == 1}, UNKNOWN)
        merges = {
            pieces[piece[:cut]] * len(subwords) + pieces[piece[cut:]]: number
            for piece, number in pieces.items()
            for cut in range(1, len(piece))
            if piece[:cut] in pieces and piece[cut:] in pieces
        }
        self._merges = _Lookup(merges, PADDING)

    def encode(self, sentences: tf.Tensor) -> tf.Tensor:
        """Returns each sentence's ids and END, padded to the longest sentence, [n, width] int32.

        Args:
            sentences: [n] strings in UTF-8; bytes that are not become UNKNOWN.
        Cost: grows with the number of words, and with the square of the longest one's length.
        """
        sentences = tf.strings.unicode_transcode(sentences, "UTF-8", "UTF-8")
        words = tf.strings.split(tf.strings.regex_replace(sentences, f"[ {_SPACE}]+$", ""), " ")
        words = tf.ragged.boolean_mask(words, words != "")
        characters = tf.strings.unicode_decode(_SPACE + words.values, "UTF-8")
        ids = characters.with_values(self._characters(characters.values)).to_tensor(PADDING)
        ids = self._merged(ids)
        ids = words.with_values(tf.RaggedTensor.from_tensor(ids, padding=PADDING)).merge_dims(1, 2)
        ids = tf.concat([ids, tf.fill([ids.nrows(), 1], END)], 1)
        # Several UNKNOWN become one. Only END can come before a sentence's first id, so sentences do not mix.
        repeated = (ids.values == UNKNOWN) & (tf.roll(ids.values, 1, 0) == UNKNOWN)
        return tf.ragged.boolean_mask(ids, ids.with_values(~repeated)).to_tensor(PADDING)

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the sentences of rows of ids, [n] strings; each ends at its first END.

        Args:
            ids: [n, width], each less than `len(subwords)`.
        """
        ended = tf.cumsum(tf.cast(ids == END, tf.int32), 1) > 0
        text = tf.strings.reduce_join(tf.where(ended, "", tf.gather(self._texts, ids)), 1)
        return tf.strings.regex_replace(tf.strings.regex_replace(text, f"^{_SPACE}+", ""), _SPACE, " ")

    def _merged(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns words after all their merges: ids of subwords for ids of characters, both [words, width], padded."""
        width = tf.shape(ids)[1]
        positions = tf.range(width)

        def candidates(ids: tf.Tensor) -> tf.Tensor:
            pairs = tf.cast(ids[:, :-1], tf.int64) * len(self._texts) + tf.cast(ids[:, 1:], tf.int64)
            return tf.pad(self._merges(pairs), [[0, 0], [0, 1]])  # the last one has no neighbour

        def step(ids: tf.Tensor, merged: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            scores = tf.where(merged == PADDING, -np.inf, tf.gather(self._scores, merged))
            best = tf.argmax(scores, 1, tf.int32)[:, tf.newaxis]  # the first of several
            best = tf.where(tf.reduce_any(merged != PADDING, 1, keepdims=True), best, width)
            following = tf.pad(ids[:, 1:], [[0, 0], [0, 1]])
            ids = tf.where(positions < best, ids, tf.where(positions == best, merged, following))
            return ids, candidates(ids)

        def are_left(_: tf.Tensor, merged: tf.Tensor) -> tf.Tensor:
            return tf.reduce_any(merged != PADDING)

        return tf.while_loop(are_left, step, [ids, candidates(ids)])[0]


class _Lookup:
    """A table from whole numbers to whole numbers, as constants of the graph."""

    def __init__(self, table: Mapping[int, int], default: int) -> None:
        end = np.iinfo(np.int64).max  # so that there is a place for each key
        self._keys = np.array([*sorted(table), end], np.int64)
        self._values = np.array([*(table[key] for key in sorted(table)), default], np.int32)
        self._default = default

    def __call__(self, keys: tf.Tensor) -> tf.Tensor:
        # Not tf.searchsorted, which does not take an empty tensor.
        flat = tf.cast(tf.reshape(keys, [1, -1]), tf.int64)
        places = tf.raw_ops.LowerBound(sorted_inputs=self._keys[np.newaxis], values=flat)
        found = tf.where(tf.gather(self._keys, places) == flat, tf.gather(self._values, places), self._default)
        return tf.reshape(found, tf.shape(keys))
