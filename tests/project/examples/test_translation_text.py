"""Compares subwords in a graph, of examples/translation, with sentencepiece."""

from __future__ import annotations

import functools
import random

import numpy as np
import tensorflow as tf
from examples.translation_parts import GraphSubwords, subwords
from sentencepiece import sentencepiece_model_pb2

# Text with special rules in sentencepiece, text that no phrase contains, and text that looks like a mark.
CHARACTERS = [
    *" ▁eint\0\t\n1日本😀⁇ß",
    "ü",
    "u\u0308",
    "\u00a0",
    "\ufeff",
    "\ufffd",
    "<unk>",
    "</s>",
    " zw",
    "und",
    "  ",
]


@functools.cache
def traced(cut):
    graph = GraphSubwords(cut)
    return (
        tf.function(graph.encode, input_signature=[tf.TensorSpec([None], tf.string)]),
        tf.function(graph.decode, input_signature=[tf.TensorSpec([None, None], tf.int32)]),
    )


def ask(cut, sentences):
    """Splits sentences in the graph and joins them; both must equal sentencepiece."""
    encode, decode = traced(cut)
    ids = encode(tf.constant(sentences, tf.string)).numpy()
    expected = [[*row, subwords.END] for row in cut.encode(sentences)]
    assert ids.dtype == np.int32 and ids.shape == (len(sentences), max(map(len, expected), default=ids.shape[1]))
    for sentence, row, expected_row in zip(sentences, ids, expected):
        assert row[: len(expected_row)].tolist() == expected_row, sentence
        assert (row[len(expected_row) :] == subwords.PADDING).all(), sentence
    assert [each.decode() for each in decode(ids).numpy()] == cut.decode(ids)


def test_graph_splits_and_joins_phrases_like_sentencepiece(cut, texts):
    ask(cut, [*texts[0], *texts[1]])


def test_graph_splits_and_joins_any_text_like_sentencepiece(cut):
    for sentences in ([], [""], ["", " ", "▁", " ▁ ▁"], ["a"], ["  two  spaces  ", ""], ["a" * 300]):
        ask(cut, sentences)
    draw = random.Random(3)
    drawn = ["".join(draw.choices(CHARACTERS, k=draw.randrange(12))) for _ in range(3000)]
    anything = ["".join(map(chr, draw.sample(range(0xD800), draw.randrange(9)))) for _ in range(1000)]
    ask(cut, [*drawn, *anything])


def test_graph_accepts_bytes_that_are_not_text(cut):
    wrong = [b"\xff\xfeab", b"zw\xc3", b"\xed\xa0\x80 1"]
    ids = GraphSubwords(cut).encode(tf.constant(wrong)).numpy()
    for row, sentence in zip(ids, wrong):
        assert row[row != subwords.PADDING].tolist() == [*cut._processor.encode(sentence), subwords.END]


def test_graph_merges_the_leftmost_of_equal_scores(cut, texts):
    model = sentencepiece_model_pb2.ModelProto.FromString(cut.model)
    for number, piece in enumerate(model.pieces):
        piece.score = -(number // 20)
    ask(subwords.Subwords(model.SerializeToString()), [*texts[0][:300], *texts[1][:300], "eeeee nnn"])


def test_graph_joins_ids_in_any_order_like_sentencepiece(cut):
    draw = np.random.default_rng(1)
    ids = draw.integers(0, len(cut), [3000, 7], np.int32)
    space = cut._processor.piece_to_id("▁")
    ids[1000:2000] = np.where(draw.random([1000, 7]) < 0.6, space, ids[1000:2000])
    ids[2000:] = np.where(draw.random([1000, 7]) < 0.3, subwords.UNKNOWN, ids[2000:])
    decoded = GraphSubwords(cut).decode(tf.constant(ids)).numpy()
    assert [each.decode() for each in decoded] == cut.decode(ids)
    assert cut.decode([]) == []
