"""The data of examples/translation: true German, held out phrases, a rank's lines, subwords, batches, positions."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from num2words import num2words

from harness.examples import EXAMPLES, run

# Not for longer than this: the folder also holds examples/horovod, which `import horovod` would find.
sys.path.insert(0, str(EXAMPLES))
from translation import corpus, lines, phrases, subwords, words
from translation.batches import Batches
from translation.lines import Ranks
from translation.plan import Plan

sys.path.remove(str(EXAMPLES))

DIGITS = dict(zip(["ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"], range(1, 10)))
TEENS = ["zehn", "elf", "zwölf", "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"]
TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def german(number: int) -> str:
    """The rule of German numbers below a million, as a grammar has it."""
    if number >= 1000:
        return (
            german(number // 1000).removesuffix("s" if number // 1000 % 100 == 1 else " ")
            + "tausend"
            + (german(number % 1000) if number % 1000 else "")
        )
    units = list(DIGITS)
    if number >= 100:
        return units[number // 100 - 1] + "hundert" + (german(number % 100) if number % 100 else "")
    if number >= 20:
        unit = f"{units[number % 10 - 1]}und" if number % 10 else ""
        return unit + TENS[number // 10 - 2]
    if number >= 10:
        return TEENS[number - 10]
    return "null" if number == 0 else "eins" if number == 1 else units[number - 1]


SOME = [*range(1300), 1999, 2000, 10_001, 21_021, 100_000, 101_000, 101_101, 999_999, *range(7, 10**6, 4999)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return corpus.make(tmp_path_factory.mktemp("corpus"), train=1500, dev=100, test=100)


@pytest.fixture(scope="module")
def texts(small):
    return [path.read_text().splitlines() for path in small["train"]]


@pytest.fixture(scope="module")
def cut(texts):
    return subwords.train([*texts[0], *texts[1]], 300)


def on_ranks(size, function):
    """Returns `function(Ranks)` of each of `size` ranks, which are threads here."""
    barrier, given = threading.Barrier(size, timeout=30), [None] * size

    def on_rank(rank):
        def all_gather(mine):
            given[rank] = pickle.dumps(mine)
            barrier.wait()
            everyone = [pickle.loads(one) for one in given]
            barrier.wait()
            return everyone

        try:
            return function(Ranks(rank, size, all_gather))
        except threading.BrokenBarrierError:
            raise
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise

    errors: list[BaseException] = []
    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(on_rank, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [one.result() for one in results]


# ---- words and phrases ---------------------------------------------------------------------------------------------


def test_cardinals_are_those_of_the_grammar_and_of_num2words():
    for number in SOME:
        assert words.cardinal(number, "de") == german(number)
        assert words.cardinal(number, "en") == num2words(number, lang="en"), number
    assert words.cardinal(10**6, "en") == "one million" and words.cardinal(10**6, "de") == "eine Million"


def test_german_ordinals_are_those_of_the_grammar():
    irregular = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}
    for number in range(1, 1000):
        rest = number % 100
        if rest in irregular:
            expected = german(number)[: -len(german(rest))] + irregular[rest]
        else:
            expected = german(number) + ("te" if 0 < rest < 20 else "ste")
        assert words.ordinal(number, "de").removeprefix("ein") == expected.removeprefix("ein"), number


def test_years_are_said_in_hundreds():
    for year in range(1100, 2000):
        assert words.year(year, "de") == german(year // 100) + "hundert" + (german(year % 100) if year % 100 else "")
    for year in range(2000, 2100):
        assert words.year(year, "de") == german(year).replace("eintausend", "tausend")
    said = {
        1997: "nineteen ninety-seven",
        1905: "nineteen oh-five",
        1900: "nineteen hundred",
        2001: "two thousand and one",
    }
    assert {year: words.year(year, "en") for year in said} == said


def test_times_of_day_are_said_as_people_do():
    said = {
        (2, 30): ("half past two", "halb drei"),
        (12, 30): ("half past twelve", "halb eins"),
        (1, 0): ("one o'clock", "ein Uhr"),
        (12, 45): ("quarter to one", "Viertel vor eins"),
        (1, 15): ("quarter past one", "Viertel nach eins"),
        (3, 25): ("twenty-five past three", "fünf vor halb vier"),
        (11, 35): ("twenty-five to twelve", "fünf nach halb zwölf"),
        (6, 40): ("twenty to seven", "zwanzig vor sieben"),
    }
    assert {time: words.clock(*time) for time in said} == said
    assert words.digital_clock(1, 5) == ("one oh-five", "ein Uhr fünf")
    assert words.digital_clock(21, 31) == ("twenty-one thirty-one", "einundzwanzig Uhr einunddreißig")


def test_currencies_are_written_as_in_a_sentence():
    singular = {code: phrases._currency(code, 1, "de") for code in ("EUR", "CHF", "SEK", "GBP", "USD")}
    assert list(singular.values()) == [
        "Euro",
        "Schweizer Franken",
        "schwedische Krone",
        "britisches Pfund",
        "US-Dollar",
    ]
    assert [phrases._currency(code, 2, "de") for code in ("GBP", "JPY")] == ["britische Pfund", "japanische Yen"]


def test_corpus_is_that_of_its_seed_and_holds_phrases_out(small, texts, tmp_path):
    again = corpus.make(tmp_path / "again", train=1500, dev=100, test=100)
    zipped = corpus.make(tmp_path / "zipped", train=1500, dev=100, test=100, compress=True)
    other = corpus.make(tmp_path / "other", train=1500, dev=100, test=100, seed=1)
    for part, files in small.items():
        for place, path in enumerate(files):
            assert again[part][place].read_bytes() == path.read_bytes() != other[part][place].read_bytes()
            assert gzip.decompress(zipped[part][place].read_bytes()) == path.read_bytes()
    for place in range(2):
        by_part = [path[place].read_text().splitlines() for path in small.values()]
        assert [len(part) for part in by_part] == [100, 100, 1500]
        assert len(set().union(*by_part)) == 1700  # each phrase once, in each language
    assert not re.search(r"eins(tausend|hundert)|ein (Stunde|Krone)|\d[a-z]", "\n".join(texts[1]))
    assert all(text == text.strip() and text for text in [*texts[0], *texts[1]])


# ---- a rank's lines ------------------------------------------------------------------------------------------------

FILES = {
    "as written": "eins\nzwei\ndrei\nvier\nfünf\nsechs\nsieben\n",
    "no line break at the end": "a\nbb\nccc\nd",
    "empty lines": "\n\nÄ\n\n\nö\n\n",
    "line breaks of Windows": "ein Satz\r\nnoch einer\r\n",
    "uneven": "x\n" * 3 + "lang " * 500 + "\n" + "y\n" * 9,
    "one line": "allein\n",
    "none": "",
}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_lines_of_all_ranks_are_the_files(tmp_path, ending, size):
    for name, text in FILES.items():
        expected = [line.strip() for line in text.split("\n")]
        expected = expected[:-1] if expected[-1] == "" else expected
        # The other file has other bytes for the same lines: a rank's ranges of bytes do not match.
        contents = {"source": text, "target": "".join(f"{i} {'z' * (i % 3 * 40)}\n" for i in range(len(expected)))}
        paths = []
        for side, content in contents.items():
            paths.append(tmp_path / f"{name}.{side}{ending}")
            paths[-1].write_bytes(gzip.compress(content.encode()) if ending else content.encode())
        got = on_ranks(size, functools.partial(lines.read_range, paths))
        assert [total for total, _ in got] == [len(expected)] * size
        assert [line for _, (source, _) in got for line in source] == expected, name
        assert [line.split()[0] for _, (_, target) in got for line in target] == [str(i) for i in range(len(expected))]
        assert [len(source) for _, (source, _) in got] == list(np.diff(lines.ranges(len(expected), size)))


def test_lines_of_a_rank_are_read_without_the_others(tmp_path, monkeypatch):
    path, read = tmp_path / "long", [0] * 4
    path.write_bytes(b"some twenty letters.\n" * 50_000)

    class Counting:
        def __init__(self, file, rank):
            self.file, self.rank, self.seek = file, rank, file.seek

        def read(self, count):
            read[self.rank] += count
            return self.file.read(count)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    real, this = Path.open, threading.local()

    def read_range(ranks):
        this.rank = ranks.rank
        return lines.read_range([path], ranks)

    monkeypatch.setattr(Path, "open", lambda self, mode: Counting(real(self, mode), this.rank))
    assert [len(texts[0]) for _, texts in on_ranks(4, read_range)] == [12_500] * 4
    share = path.stat().st_size / 4
    assert all(2 * share - 50 < one < 3 * share + 50 for one in read), (read, share)


def test_lines_of_unequal_files_are_refused(tmp_path):
    (tmp_path / "a").write_text("1\n2\n")
    (tmp_path / "b").write_text("1\n")
    for size in (1, 2):
        with pytest.raises(ValueError, match="as many lines in each of its files"):
            on_ranks(size, lambda ranks: lines.read_range([tmp_path / "a", tmp_path / "b"], ranks))


def test_sample_is_spread_over_the_file(tmp_path):
    path = tmp_path / "numbers"
    path.write_text("".join(f"{number:0200d}\n" for number in range(6400)))
    for count, most in ((640, 640), (10_000, 6400)):
        sampled = [int(line) for line in lines.sample(path, count)]
        assert 0.9 * most <= len(set(sampled)) == len(sampled) <= most
        assert np.histogram(sampled, 10, (0, 6400))[0].min() > most / 20


# ---- subwords ------------------------------------------------------------------------------------------------------


def test_subwords_give_sentences_back(cut, texts, tmp_path):
    ids = cut.encode(texts[1])
    assert cut.decode(ids) == texts[1]
    assert cut.decode([[subwords.BEGIN, *ids[0], subwords.END, 17, 17], []]) == [texts[1][0], ""]
    assert min(map(min, ids)) > subwords.END and max(map(max, ids)) < len(cut) <= 300
    cut.save(tmp_path / "model")
    again = subwords.train([*texts[0], *texts[1]], 300)
    for other in (subwords.Subwords.load(tmp_path / "model"), pickle.loads(pickle.dumps(cut)), again):
        assert other.model == cut.model and other.encode(texts[1][:50]) == ids[:50]


def test_subwords_follow_the_rule_that_a_graph_can_follow(cut, texts):
    scores = {piece: score for number, (piece, score) in enumerate(cut.pieces) if number > subwords.END}

    def rule(text):
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            joined = [scores.get(one + other, -np.inf) for one, other in zip(parts, parts[1:])]
            if not joined or max(joined) == -np.inf:
                return parts
            place = joined.index(max(joined))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]

    number_of = {piece: number for number, (piece, _) in enumerate(cut.pieces)}
    for text in [*texts[0][:150], *texts[1][:150], "a phrase of other words 1997"]:
        ids = [number_of.get(piece, subwords.UNKNOWN) for piece in rule(text)]
        without_repeats = [one for i, one in enumerate(ids) if one != subwords.UNKNOWN or ids[i - 1 : i] != [one]]
        assert cut.encode([text]) == [without_repeats], text


# ---- batches -------------------------------------------------------------------------------------------------------

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


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip([*one[0].values(), one[1]], [*other[0].values(), other[1]]))


def put_together(parts):
    inputs = {name: np.concatenate([part[0][name] for part in parts]) for name in parts[0][0]}
    return inputs, np.concatenate([part[1] for part in parts])


@pytest.fixture(scope="module")
def alone(small, cut):
    return Batches(small["train"], cut, **SETTINGS)


@pytest.fixture(scope="module")
def epochs(alone):
    return epochs_of(alone)


def test_batches_have_each_pair_once_an_epoch(epochs, texts, cut):
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


def test_batches_cost_what_they_were_allowed_to(epochs, alone):
    shapes = [(batch[0]["source"].shape, batch[1].shape) for batch in epochs[0]]
    costs = [rows * (source + target) for (rows, source), (_, target) in shapes]
    assert max(costs) <= 900 and np.mean(costs) > 800
    assert len(set(shapes)) <= 2 * SETTINGS["buckets"] and len({shape[1:] for shape, _ in shapes}) > 2
    real, padded = np.sum([alone.tokens(index) for index in range(len(alone))], axis=0)
    assert padded == sum(costs) and real == sum(
        (batch[0]["source"] > 0).sum() + (batch[1] > 0).sum() for batch in epochs[1]
    )
    assert f"{len(alone)} batches" in alone.summary() and "1,500 pairs" in alone.summary()


def test_first_two_batches_show_keras_that_widths_differ(alone):
    in_order = Plan(alone.plan.lengths, tokens=900, buckets=5, seed=0, shuffle=False)
    for plan, epochs in ((alone.plan, 40), (in_order, 1)):
        for epoch in range(epochs):
            first, second, *rest = [bucket.widths for bucket, _ in plan.epoch(epoch)]
            assert first[0] != second[0] and first[1] != second[1]
            assert len(rest) + 2 == plan.steps
    one_width = Plan(np.full([500, 2], 7), tokens=140, buckets=5, seed=0)
    assert [len(sentences) for _, sentences in one_width.epoch(0)] == [10] * 50


def test_buckets_have_as_little_padding_as_any():
    random = np.random.default_rng(0)
    for _ in range(10):
        lengths = random.integers(1, 9, [300, 2])
        longer = lengths.max(axis=1)
        kinds = np.unique(longer)

        def padded(cuts):
            members = [lengths[(longer > low) & (longer <= high)] for low, high in zip([0, *cuts], [*cuts, 9])]  # noqa: B023
            return sum(len(some) * some.max(axis=0).sum() for some in members)

        least = min(padded(cuts) for count in range(3) for cuts in itertools.combinations(kinds[:-1], count))
        plan = Plan(lengths, tokens=32, buckets=3, seed=0)
        assert len(plan.buckets) == 3
        assert sum(len(bucket.sentences) * sum(bucket.widths) for bucket in plan.buckets) == least


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
            assert same(put_together(shares), batch) and max(rows) - min(rows) <= 1
    # A rank holds its share; where batches are of an uneven number of rows, two ranks hold the row between them.
    held = [len(batches._held.numbers) for batches in everyone]
    assert max(held) < 1.25 * 1500 / size, held


def test_batches_go_on_where_they_were(small, cut, alone, epochs):
    positions = [position for _, position in alone.remaining()]
    position = json.loads(json.dumps(positions[6]))
    assert (position["epoch"], position["batch"]) == (0, 7)
    rest = [batch for batch, _ in Batches(small["train"], cut, **SETTINGS).remaining(position)]
    assert len(rest) == len(epochs[0]) - 7 and all(map(same, rest, epochs[0][7:]))
    # Another number of ranks goes on with the same batches.
    parts = on_ranks(3, lambda ranks: list(Batches(small["train"], cut, ranks=ranks, **SETTINGS).remaining(position)))
    assert all(same(put_together([step[0] for step in steps]), batch) for steps, batch in zip(zip(*parts), rest))
    assert parts[0][-1][1] == {**position, "epoch": 1, "batch": 0}
    with pytest.raises(ValueError, match="the same data"):
        next(Batches(small["train"], cut, **(SETTINGS | {"seed": 4})).remaining(position))


def test_batches_leave_out_what_is_empty_or_too_long(tmp_path, cut):
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


def test_batches_train_a_keras_model(small, cut, texts):
    import keras

    class Seen(keras.layers.Layer):
        """Adds up what passes, to compare it with the corpus."""

        def build(self, _):
            self.total = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

        def call(self, ids):
            self.total.assign_add(keras.ops.sum(keras.ops.cast(ids, "int64")))
            return ids

    source, target = (
        keras.Input([None], dtype="int32", name="source"),
        keras.Input([None], dtype="int32", name="target"),
    )
    seen = Seen()
    embed = keras.layers.Embedding(len(cut), 4)
    context = keras.layers.GlobalAveragePooling1D(keepdims=True)(embed(seen(source)))
    model = keras.Model({"source": source, "target": target}, keras.layers.Dense(len(cut))(embed(target) + context))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=subwords.PADDING))
    batches = Batches(small["train"], cut, **SETTINGS)
    model.fit(batches, epochs=2, shuffle=False, verbose=0)
    assert batches.epoch == 2 and np.isfinite(model.evaluate(batches, verbose=0))
    ids = sum(map(sum, cut.encode(texts[0]))) + subwords.END * len(texts[0])
    assert int(seen.total) == 3 * ids


@pytest.mark.long
@pytest.mark.parallel
def test_batches_train_two_ranks_as_one_process(small, cut, tmp_path):
    cut.save(tmp_path / "subwords")
    program = [Path(__file__).with_name("translation_program.py"), tmp_path, *small["train"]]
    env = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    run(tmp_path, sys.executable, *program, "alone", env=env)
    run(tmp_path, Path(sys.executable).with_name("keras-ddl"), "run", "-np", 2, "python", *program, "ranks", env=env)
    results = [np.load(tmp_path / f"{name}.npz") for name in ("alone", "ranks")]
    assert len(results[0].files) > 3
    for name in results[0].files:
        np.testing.assert_allclose(results[1][name], results[0][name], rtol=1e-10, atol=1e-13, err_msg=name)
