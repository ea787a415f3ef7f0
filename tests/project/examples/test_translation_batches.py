"""The batches of examples/translation: exact epochs, the same on any number of ranks, and positions."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from examples.translation_parts import Batches, Plan, on_ranks, subwords

SETTINGS = {"tokens": 900, "buckets": 5, "seed": 3}


def epochs_of(batches: Batches, count=2):
    """Returns this rank's rows of each batch of some epochs."""
    found, position = [], None
    for _ in range(count):
        epoch = []
        for batch, position in batches.remaining(position):  # noqa: B020, B007
            epoch.append(batch)
        found.append(epoch)
    return found


def pairs_of(epoch, cut):
    return [
        pair
        for inputs, labels in epoch
        for pair in zip(cut.decode(inputs["source"]), cut.decode(inputs["target"]), cut.decode(labels))
    ]


def are_equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip([*one[0].values(), one[1]], [*other[0].values(), other[1]]))


def joined(parts):
    inputs = {name: np.concatenate([part[0][name] for part in parts]) for name in parts[0][0]}
    return inputs, np.concatenate([part[1] for part in parts])


@pytest.fixture(scope="module")
def alone(small, cut):
    return Batches(small["train"], cut, **SETTINGS)


@pytest.fixture(scope="module")
def epochs(alone):
    return epochs_of(alone)


def test_batches_have_each_pair_once_per_epoch(epochs, texts, cut):
    expected = sorted(zip(*texts, texts[1]))
    for epoch in epochs:
        assert sorted(pairs_of(epoch, cut)) == expected
    assert pairs_of(epochs[0], cut) != pairs_of(epochs[1], cut)
    for inputs, labels in epochs[0]:
        assert (inputs["target"][:, 0] == subwords.BEGIN).all() and (inputs["target"][:, 1:] != subwords.END).all()
        for ids in (inputs["source"], labels):
            assert ids.dtype == np.int32
            assert ((ids == subwords.END).sum(axis=1) == 1).all()
            after = np.cumsum(ids == subwords.END, axis=1) - (ids == subwords.END)
            assert ((ids == subwords.PADDING) == (after > 0)).all()


def test_batches_stay_within_their_cost(epochs, alone):
    shapes = [(batch[0]["source"].shape, batch[1].shape) for batch in epochs[0]]
    costs = [rows * (source + target) for (rows, source), (_, target) in shapes]
    assert max(costs) <= 900 and np.mean(costs) > 800
    assert len(set(shapes)) <= 2 * SETTINGS["buckets"] and len({shape[1:] for shape, _ in shapes}) > 2
    real, padded = np.sum([alone.tokens(index) for index in range(len(alone))], axis=0)
    assert padded == sum(costs) and real == sum(
        (batch[0]["source"] > 0).sum() + (batch[1] > 0).sum() for batch in epochs[1]
    )
    assert f"{len(alone)} batches" in alone.summary() and "1,500 pairs" in alone.summary()


def test_first_two_batches_show_keras_that_widths_vary(alone):
    in_order = Plan(alone.plan.lengths, tokens=900, buckets=5, seed=0, shuffle=False)
    for plan, epochs in ((alone.plan, 40), (in_order, 1)):
        for epoch in range(epochs):
            first, second, *rest = [bucket.widths for bucket, _ in plan.epoch(epoch)]
            assert first[0] != second[0] and first[1] != second[1]
            assert len(rest) + 2 == plan.steps
    one_width = Plan(np.full([500, 2], 7), tokens=140, buckets=5, seed=0)
    assert [len(sentences) for _, sentences in one_width.epoch(0)] == [10] * 50


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("order", ["as it comes", "sorted by length"])
def test_batches_are_the_same_on_any_number_of_ranks(small, texts, cut, epochs, tmp_path, size, order):
    paths = small["train"]
    if order == "sorted by length":
        both = sorted(zip(*texts), key=lambda pair: len(pair[1]))
        paths = [tmp_path / "en.gz", tmp_path / "de.gz"]
        for path, side in zip(paths, zip(*both)):
            path.write_bytes(gzip.compress("".join(f"{text}\n" for text in side).encode()))
        epochs = epochs_of(Batches(paths, cut, **SETTINGS))
    everyone = on_ranks(size, lambda ranks: Batches(paths, cut, ranks=ranks, **SETTINGS))
    parts = [epochs_of(batches) for batches in everyone]
    for number, epoch in enumerate(epochs):
        assert [len(part[number]) for part in parts] == [len(epoch)] * size
        for step, batch in enumerate(epoch):
            shares = [part[number][step] for part in parts]
            rows = [len(share[1]) for share in shares]
            assert are_equal(joined(shares), batch) and max(rows) - min(rows) <= 1
    # A rank has its share; if the number of rows is odd, two ranks share the row between them.
    held = [len(batches._held.numbers) for batches in everyone]
    assert max(held) < 1.25 * 1500 / size, held


def test_batches_resume_at_their_position(small, cut, alone, epochs):
    positions = [position for _, position in alone.remaining()]
    position = json.loads(json.dumps(positions[6]))
    assert (position["epoch"], position["batch"]) == (0, 7)
    rest = [batch for batch, _ in Batches(small["train"], cut, **SETTINGS).remaining(position)]
    assert len(rest) == len(epochs[0]) - 7 and all(map(are_equal, rest, epochs[0][7:]))
    # Another number of ranks continues with the same batches.
    parts = on_ranks(3, lambda ranks: list(Batches(small["train"], cut, ranks=ranks, **SETTINGS).remaining(position)))
    assert all(are_equal(joined([step[0] for step in steps]), batch) for steps, batch in zip(zip(*parts), rest))
    assert parts[0][-1][1] == {**position, "epoch": 1, "batch": 0}
    with pytest.raises(ValueError, match="the same data"):
        next(Batches(small["train"], cut, **(SETTINGS | {"seed": 4})).remaining(position))


def test_batches_skip_empty_and_long_sentences(tmp_path, cut):
    (tmp_path / "en").write_text("one\n\ntwo\n" + "three " * 50 + "\nfour\n")
    (tmp_path / "de").write_text("eins\nleer\n\ndrei\nvier\n")
    paths = (tmp_path / "en", tmp_path / "de")
    batches = Batches(paths, cut, tokens=64, longest=40)
    assert sorted(pairs_of(epochs_of(batches, 1)[0], cut)) == [("four", "vier", "vier"), ("one", "eins", "eins")]
    assert batches.plan.left_out == 3 and "2 pairs of sentences, 3 left out" in batches.summary()
    with pytest.raises(ValueError, match="must hold the longest pair"):
        Batches(paths, cut, tokens=3, longest=40)
    with pytest.raises(ValueError, match="must have a pair"):
        Batches(paths, cut, tokens=64, longest=0)
    with pytest.raises(ValueError, match="a row for each rank"):
        on_ranks(3, lambda ranks: Batches(paths, cut, tokens=64, longest=40, ranks=ranks))


def test_batches_of_another_rank_are_refused(small, cut):
    first, _ = on_ranks(2, lambda ranks: Batches(small["train"], cut, ranks=ranks, **SETTINGS))
    with pytest.raises(KeyError, match="its own rows"):
        first[0]
