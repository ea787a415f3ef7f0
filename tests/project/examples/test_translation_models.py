"""The models of examples/translation: what positions may attend to, the loss, and beam search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from examples.translation_parts import LSTMTranslator, TokenCrossentropy, Transformer, beam_search, translated
from examples.translation_parts import subwords as names

VOCABULARY = 30
SOURCE = np.array([[7, 8, 9, 10, 3], [11, 12, 3, 0, 0], [13, 3, 0, 0, 0]], np.int32)
TARGET = np.array([[2, 5, 6, 7], [2, 8, 9, 0], [2, 4, 0, 0]], np.int32)

MODELS = {
    "before": lambda: Transformer(VOCABULARY, width=8, layers=2, heads=2, inner=16, longest=64),
    "after": lambda: Transformer(VOCABULARY, width=8, layers=2, heads=2, inner=16, longest=64, normalize="after"),
    "lstm": lambda: LSTMTranslator(VOCABULARY, units=8, layers=2),
}


@pytest.fixture(scope="module", params=["before", pytest.param("after", marks=pytest.mark.long), "lstm"])
def model(request):
    tf.random.set_seed(1)
    made = MODELS[request.param]()
    made({"source": SOURCE, "target": TARGET})
    for variable in made.trainable_variables:  # far from their initial values, so that every weight matters
        variable.assign(variable + tf.random.normal(variable.shape, stddev=0.3))
    return made


def logits_of(model, source, target):
    return np.asarray(model({"source": source, "target": target}))


def test_position_does_not_see_later_ones(model):
    before = logits_of(model, SOURCE, TARGET)
    changed = TARGET.copy()
    changed[:, 2] = 20
    after = logits_of(model, SOURCE, changed)
    np.testing.assert_allclose(after[:, :2], before[:, :2], atol=1e-5)
    assert np.abs(after[:, 2:] - before[:, 2:]).max() > 1e-3


def test_padding_of_the_source_is_ignored(model):
    before = logits_of(model, SOURCE, TARGET)
    np.testing.assert_allclose(logits_of(model, np.pad(SOURCE, [(0, 0), (0, 4)]), TARGET), before, atol=1e-5)
    changed = SOURCE.copy()
    changed[1, 0] = 20
    after = logits_of(model, changed, TARGET)
    np.testing.assert_allclose(after[[0, 2]], before[[0, 2]], atol=1e-5)
    assert np.abs(after[1] - before[1]).max() > 1e-3


def test_step_by_step_decoding_gives_the_logits_of_training(model):
    memory = model.encode(SOURCE)
    state, found = model.start(memory), []
    for position in range(TARGET.shape[1]):
        logits, state = model.step(TARGET[:, position], position, memory, state)
        found.append(np.asarray(logits))
    np.testing.assert_allclose(np.stack(found, 1), logits_of(model, SOURCE, TARGET), atol=1e-5)


def test_attention_weights_of_the_source_sum_to_one(model):
    weights = np.asarray(model.attention(SOURCE, TARGET))
    assert weights.shape == (3, 4, 5)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    assert weights[SOURCE[:, np.newaxis].repeat(4, 1) == names.PADDING].max() < 1e-6


def test_greedy_translation_takes_the_likeliest_subwords(model):
    ids, score = tf.function(lambda source: translated(model, source, beam=1, longest=6))(SOURCE)
    for row, source in enumerate(SOURCE):
        so_far, total, length = [names.BEGIN], 0.0, 0
        while len(so_far) < 7 and so_far[-1] != names.END:
            logits = logits_of(model, source[np.newaxis], np.array([so_far], np.int32))[0, -1]
            so_far.append(int(logits.argmax()))
            total += logits.max() - np.log(np.exp(logits).sum())
            length += 1
        expected = so_far[1:] + [names.PADDING] * (6 - length)
        assert ids[row].numpy().tolist() == expected[: ids.shape[1]]
        np.testing.assert_allclose(score[row], total / ((5 + length) / 6) ** 0.6, rtol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_mean_over_tokens(smoothing):
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(3, 4, 6)), np.array([[1, 2, 3, 0], [4, 3, 0, 0], [5, 5, 5, 3]])
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.eye(6)[labels] * (1 - smoothing) + smoothing / 6
    expected = -(wanted * log_probability).sum(-1)[labels != names.PADDING].mean()
    np.testing.assert_allclose(float(TokenCrossentropy(smoothing)(labels, logits)), expected, rtol=1e-5)


def table_step(table):
    """Returns a decoding step whose logits depend on a hypothesis's last two subwords and its row."""

    def step(ids, position, state):
        logits = tf.gather_nd(table, tf.stack([state["row"], state["before"], ids], axis=1))
        return logits, {"row": state["row"], "before": ids}

    return step


def exhaustive_best(table, row, longest, penalty):
    """Returns the best of all sequences that end, or have the longest length, by exhaustive search."""
    vocabulary, best = table.shape[-1], (-np.inf, None)
    log_probability = table - np.log(np.exp(table).sum(-1, keepdims=True))
    for length in range(1, longest + 1):
        for ids in itertools.product(range(vocabulary), repeat=length):
            if names.END in ids[:-1] or (ids[-1] != names.END and length < longest):
                continue
            two, total = (names.BEGIN, names.BEGIN), 0.0
            for one in ids:
                total += log_probability[row, two[0], two[1], one]
                two = (two[1], one)
            score = total / ((5 + length) / 6) ** penalty
            best = max(best, (score, ids))
    return best


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_wide_beam_finds_the_best_sequence(penalty):
    longest, vocabulary = 3, 5
    table = np.random.default_rng(2).normal(scale=2, size=(4, vocabulary, vocabulary, vocabulary)).astype("float32")
    state = {"row": tf.range(4), "before": tf.fill([4], names.BEGIN)}
    search = tf.function(
        lambda: beam_search(table_step(table), state, beam=125, longest=longest, length_penalty=penalty)
    )
    ids, score = search()
    for row in range(4):
        best, expected = exhaustive_best(table, row, longest, penalty)
        padded = list(expected) + [names.PADDING] * (ids.shape[1] - len(expected))
        assert ids[row].numpy().tolist() == padded
        np.testing.assert_allclose(score[row], best, rtol=1e-4)
