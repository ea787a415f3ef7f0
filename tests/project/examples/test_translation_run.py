"""A training of examples/translation from its corpus to its result, and what is made of it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from examples.translation_parts import (
    Translator,
    corpus,
    evaluation,
    history,
    run_directory,
    scores,
    settings,
    training,
    translated,
)
from examples.translation_parts import subwords as marks

from harness.commands import keras_ddl
from harness.examples import EXAMPLES
from harness.launching import python_path
from keras_ddl import checkpoint, model_state

CHANGED = {
    "width": 16,
    "heads": 2,
    "inner": 32,
    "layers": 1,
    "vocabulary": 200,
    "tokens": 2000,
    "buckets": 1,
    "epochs": 3,
    "average": 2,
    "save_every": 7,
    "warmup": 10,
}
SMALL = dataclasses.replace(settings.PRESETS["transformer"], **CHANGED)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    sizes = ["--train", "400", "--dev", "20", "--test", "10", "--gzip"]
    data, output, said = str(folder / "data"), str(folder / "output"), io.StringIO()
    flags = [f"--{name.replace('_', '-')}={getattr(SMALL, name)}" for name in CHANGED]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr("sys.argv", ["corpus", data, *sizes])
        corpus.main()
        patch.setattr("sys.argv", ["training", data, "--output", output, "--verbose", "2", *flags])
        training.main()
    assert re.search(r"400 pairs of sentences, 0 left out\n\d+ batches an epoch", said.getvalue()), said.getvalue()
    exact, bleu = re.search(r"test: exact match ([\d.]+), BLEU ([\d.]+)\n$", said.getvalue()).groups()
    found = {"exact": float(exact), "bleu": float(bleu)}
    return run_directory.RunDirectory(output), corpus.find(data, ["train", "dev", "test"]), found


@pytest.mark.long
def test_a_training_writes_its_curve_and_its_checkpoints(trained):
    run, _, found = trained
    columns = history.read(run.history)
    assert columns["epoch"] == [0, 1, 2]
    assert columns["loss"][2] < columns["loss"][0] - 0.3
    assert all(0 <= value <= 1 for value in columns["exact"]) and all(0 <= value <= 100 for value in columns["bleu"])
    assert all(100 < value < 1e7 for value in columns["tokens_per_second"])
    assert run.picture.read_bytes().startswith(b"\x89PNG")
    assert set(found) == {"exact", "bleu"}
    assert settings.Settings.load(run.path) == SMALL


@pytest.mark.long
def test_the_result_is_the_mean_of_the_last_checkpoints(trained):
    run, _, _ = trained
    steps = [one.step for one in checkpoint.list_checkpoints(run.checkpoints)]
    assert len(steps) == 2
    model, _, _ = run.load()
    result = [variable.numpy() for variable in model.trainable_variables]
    each = []
    for step in steps:
        model_state.restore_checkpoint(model, run.checkpoints, step, optimizer=False)
        each.append([variable.numpy() for variable in model.trainable_variables])
    for place, value in enumerate(result):
        np.testing.assert_allclose(value, (each[0][place] + each[1][place]) / 2, rtol=1e-6, atol=1e-7)
    assert np.abs(each[0][0] - each[1][0]).max() > 1e-4


@pytest.mark.long
def test_a_training_goes_on_from_its_last_checkpoint(trained, tmp_path):
    run, files, _ = trained
    training.train(dataclasses.replace(SMALL, epochs=2), files, tmp_path)
    training.train(SMALL, files, tmp_path, resume=True)
    weights = []
    for directory in (run, run_directory.RunDirectory(tmp_path)):
        model, _, _ = directory.load()
        model_state.restore_checkpoint(model, directory.checkpoints, optimizer=False)
        weights.append([variable.numpy() for variable in model.trainable_variables])
    for one, other in zip(*weights):
        np.testing.assert_array_equal(one, other)
    assert history.read(tmp_path / "history.csv")["epoch"] == [0, 1, 2]


@pytest.mark.long
def test_evaluation_finds_the_scores_of_the_training(trained, monkeypatch, capsys, tmp_path):
    run, files, found = trained
    data, written = str(files["test"][0].parent), tmp_path / "translations"
    monkeypatch.setattr("sys.argv", ["evaluation", data, "--output", str(run.path), "--write", str(written)])
    evaluation.main()
    assert capsys.readouterr().out == f"test: exact match {found['exact']:.3f}, BLEU {found['bleu']:.1f}\n"
    assert len(written.read_text().splitlines()) == 10
    monkeypatch.setattr("sys.argv", ["evaluation", str(tmp_path)])
    with pytest.raises(SystemExit):
        evaluation.main()
    assert "Make one: python -m translation.corpus" in capsys.readouterr().err


@pytest.mark.long
def test_the_result_is_exported_and_asked_by_the_commands(trained):
    run, files, _ = trained
    keras_ddl("export", run.averaged, run.saved_model)
    sentences = [pair.split()[0] for pair in ("seven", "twelve", "March")]
    command = [sys.executable, "-m", "translation", "--scores", "--output", str(run.path), *sentences]
    asked = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": python_path(EXAMPLES)}, capture_output=True, text=True
    )
    lines = [line.split("\t") for line in asked.stdout.splitlines()]
    model, subwords, _ = run.load()
    assert [text for _, text in lines] == Translator(model, subwords)(sentences), asked.stderr
    for (score, _), ids in zip(lines, subwords.encode(sentences)):
        assert float(score) == pytest.approx(float(translated(model, np.int32([[*ids, marks.END]]))[1][0]), abs=2e-3)
    assert len({score for score, _ in lines}) > 1


@pytest.mark.long
def test_a_training_does_not_go_on_with_other_sizes(trained):
    run, files, _ = trained
    for changes, word in (({"width": 32}, "width=32"), ({"vocabulary": 300}, "--vocabulary")):
        with pytest.raises(ValueError, match=word):
            training.train(dataclasses.replace(SMALL, **changes), files, run.path, resume=True)
    assert settings.Settings.load(run.path) == SMALL


def test_an_epoch_that_was_begun_again_is_one_of_the_curve(tmp_path):
    (tmp_path / "history.csv").write_text("epoch,loss\n0,5\n1,4\n1,3\n2,2\n")
    assert history.read(tmp_path / "history.csv") == {"epoch": [0, 1, 2], "loss": [5, 3, 2]}


@pytest.fixture
def talkative(cut):
    """A model of which each sentence has another answer, unlike one that is barely trained, and its subwords."""
    model = run_directory.build(SMALL, cut)
    draw = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(draw.normal(0, 1, variable.shape))
    return model, cut


def test_sentences_of_different_lengths_keep_their_order(talkative):
    model, subwords = talkative
    sentences = ["seven", "the first of May, nineteen ninety-seven", "two bottles", "", "seven"]
    translator = Translator(model, subwords, rows=2)
    together = translator(sentences)
    assert together == [translator([one])[0] for one in sentences] and together[0] == together[4]
    assert together[3] == "" and len(set(together)) > 2


def test_of_a_sentence_that_is_too_long_the_first_subwords_are_translated(talkative):
    model, subwords = talkative
    sentence = "the first of May " * 200
    assert len(subwords.encode([sentence])[0]) > 2 * SMALL.longest
    translator = Translator(model, subwords, longest=SMALL.longest)
    (first,) = subwords.decode([subwords.encode([sentence])[0][: SMALL.longest]])
    assert translator([sentence]) == translator([first]) != translator([first[:20]])


def test_a_directory_without_a_training_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Train first: keras-ddl run .* translation\.training"):
        run_directory.RunDirectory(tmp_path / "none").load()


def test_a_corpus_is_found_plain_or_packed_and_missing_files_are_named(tmp_path):
    made = corpus.make(tmp_path, train=2, dev=1, test=1)
    parts = ["train", "dev"]
    assert corpus.find(tmp_path, parts, optional=["test"]) == {part: list(paths) for part, paths in made.items()}
    for path in made["test"]:
        path.unlink()
    assert set(corpus.find(tmp_path, parts, optional=["test"])) == set(parts)
    made["dev"][1].unlink()
    with pytest.raises(FileNotFoundError, match=r"no .*dev\.de\. Name its languages with --source"):
        corpus.find(tmp_path, parts)
    with pytest.raises(FileNotFoundError, match=r"no .*train\.fr\. Name its languages with --source"):
        corpus.find(tmp_path, parts, target="fr")
    with pytest.raises(FileNotFoundError, match=r"train\.en\. Make one: python -m translation\.corpus"):
        corpus.find(tmp_path / "none", parts)


def test_a_corpus_that_is_there_is_not_replaced(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.en").write_text("my own\n")
    monkeypatch.setattr("sys.argv", ["corpus", str(tmp_path), "--train", "2", "--dev", "1", "--test", "1"])
    with pytest.raises(SystemExit):
        corpus.main()
    assert "use --force" in capsys.readouterr().err and (tmp_path / "train.en").read_text() == "my own\n"


def test_scores():
    assert scores.exact_match(["a b", "c"], ["a b", "C"]) == 0.5
    assert scores.bleu(["vier rote Flaschen und mehr"], ["vier rote Flaschen und mehr"]) == pytest.approx(100)
    assert scores.bleu(["vier rote Flaschen und mehr"], ["ganz andere Worte stehen hier"]) < 10
    with pytest.raises(ValueError):
        scores.exact_match(["a"], ["a", "b"])


def test_learning_rates_of_the_presets():
    transformer, lstm = (settings.PRESETS[name] for name in ("transformer", "lstm"))
    rate = transformer.make_schedule(2000)
    rates = [float(rate(step)) for step in range(2000)]
    assert np.argmax(rates) == transformer.warmup - 1
    assert rates[transformer.warmup - 1] == pytest.approx(transformer.learning_rate)
    assert rates[4 * transformer.warmup - 1] == pytest.approx(transformer.learning_rate / 2)
    rate = lstm.make_schedule(2000)
    assert [float(rate(step)) / lstm.learning_rate for step in (0, 999, 1999)] == pytest.approx([1, 1, 2**-9])
    assert dataclasses.replace(lstm, decay="constant").make_schedule(2000) == lstm.learning_rate
