"""The signature `translate` of examples/translation, called by TensorFlow, a server, and the command."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from examples.translation_parts import run_directory, settings, subwords, translated
from examples.translation_parts import serving as signature

from harness.examples import EXAMPLES, run
from harness.launching import python_path
from harness.serving import COMMAND, serving
from keras_ddl import export, model_state

SMALL = settings.Settings(width=16, heads=2, inner=32, units=16, layers=1, vocabulary=300, longest=24)
SENTENCES = ["the third of May", "", "  five  Äpfel, zwölf 日本 ", "twenty-one", "straße"]
PROOF = "so do the signatures translate"
pytestmark = pytest.mark.long


def exported(folder, model, cut):
    """Exports a model as a training does; returns the result with the model and its subwords."""
    keep = signature.for_export(model, cut, SENTENCES[:2], longest=SMALL.longest)
    base = export.write_base_graph(model, folder / "averaged", **keep)
    model_state.save_checkpoint(model, folder / "averaged", 1, optimizer=False, base=base)
    result = export.export_saved_model(folder / "averaged", folder / "saved_model")
    assert "in a clean process as the trained model did" in result.proof and PROOF in result.proof
    return result.path, model, cut


def untrained(kind, cut):
    model = run_directory.build(dataclasses.replace(SMALL, model=kind), cut)
    draw = np.random.default_rng(1)
    for variable in model.trainable_variables:  # larger than initially, so that outputs differ
        variable.assign(draw.normal(0, 1, variable.shape))
    return model


@pytest.fixture(scope="module")
def transformer(cut, tmp_path_factory):
    return exported(tmp_path_factory.mktemp("transformer"), untrained("transformer", cut), cut)


@functools.cache
def graph(model):
    ids = tf.TensorSpec([None, None], tf.int32)
    return tf.function(lambda source: translated(model, source, longest=SMALL.longest), input_signature=[ids])


def by_python(model, cut, sentences):
    """Returns the translations by sentencepiece and the model, without the subwords' graph."""
    encoded = [[*ids, subwords.END] for ids in cut.encode(sentences)]
    source = np.zeros([len(encoded), max(map(len, encoded))], np.int32)
    for row, ids in zip(source, encoded):
        row[: len(ids)] = ids
    ids, score = graph(model)(source)
    texts = [text if sentence.strip() else "" for text, sentence in zip(cut.decode(ids.numpy()), sentences)]
    assert len(set(texts)) > 2, "otherwise the tests say little"
    return texts, np.where([not sentence.strip() for sentence in sentences], 0, score)


@functools.cache
def loaded(path):
    return tf.saved_model.load(str(path))


def ask(path, sentences):
    answers = loaded(path).signatures["translate"](text=tf.constant(sentences, tf.string))
    assert set(answers) == {"translation", "score"}
    return [text.decode() for text in answers["translation"].numpy()], answers["score"].numpy()


def check(path, model, cut):
    texts, scores = by_python(model, cut, SENTENCES)
    found, found_scores = ask(path, SENTENCES)
    assert found == texts
    np.testing.assert_allclose(found_scores, scores, rtol=1e-4)


def test_translate_equals_python(transformer):
    path, model, cut = transformer
    check(path, model, cut)
    for sentences in ([], [""], ["", "  "]):
        texts, scores = ask(path, sentences)
        assert texts == [""] * len(sentences) and scores.tolist() == [0] * len(sentences)


def test_translate_refuses_long_sentences(transformer):
    for text, said in (("1 " * 40, "at most 24 subwords. Received:] [80"), ("a" * 385, "384 bytes. Received:] [385")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(said)):
            ask(transformer[0], ["two", text])
    (text,), _ = ask(transformer[0], ["1 " * 10])
    assert text


def test_command_translates_in_its_own_process(transformer, tmp_path):
    path, model, cut = transformer
    texts, scores = by_python(model, cut, ["the third of May", "fünf Äpfel", "", "twenty-one"])
    lines = "the third of May\nfu\u0308nf A\u0308pfel \n\ntwenty-one\n"  # as some systems write umlauts
    answers, said = command(tmp_path, "--output", path.parents[1], "--scores", text=lines)
    rows = [line.split("\t") for line in answers.splitlines()]
    assert [text for _, text in rows] == texts and said == ""
    np.testing.assert_allclose([float(score) for score, _ in rows], scores, atol=6e-4)


def test_command_names_missing_files(transformer, tmp_path):
    _, said = command(tmp_path, "two", status=1)
    assert (
        "translation.corpus data\n" in said and "keras-ddl export translation-output/averaged translation-out" in said
    )
    (tmp_path / "mine" / "averaged").mkdir(parents=True)
    _, said = command(tmp_path, "two", "--output", "mine", status=1)
    assert "translation.training" not in said and "keras-ddl export mine/averaged mine/saved_model" in said


def test_command_accepts_phrases_and_refuses_long_ones_and_other_models(transformer, tmp_path):
    path, model, cut = transformer
    texts, _ = by_python(model, cut, SENTENCES)
    assert command(tmp_path, "--output", path.parents[1], *SENTENCES)[0].splitlines() == texts
    _, said = command(tmp_path, "--output", path.parents[1], "1 " * 40, status=1)
    assert said == "Error: A sentence has at most 24 subwords. Received: 80.\n"
    tf.saved_model.save(tf.Module(), str(tmp_path / "saved_model" / "12"))
    _, said = command(tmp_path, "--output", tmp_path, "two", status=1)
    assert "has the signature 'translate'" in said and "saved_model/12" in said


def test_lstm_is_exported_and_served(cut, tmp_path):
    path, model, cut = exported(tmp_path, untrained("lstm", cut), cut)
    check(path, model, cut)
    texts, scores = by_python(model, cut, SENTENCES)
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"text": SENTENCES}, ensure_ascii=False), encoding="utf-8")
    with serving(path.parent) as server:
        server.wait_for(1)
        status, answer = server.rest(
            "POST", "/v1/models/model:predict", {"signature_name": "translate", "inputs": SENTENCES}
        )
        assert status == 200 and answer["outputs"]["translation"] == texts
        np.testing.assert_allclose(answer["outputs"]["score"], scores, rtol=1e-4)
        status, answer = server.rest(
            "POST", "/v1/models/model:predict", {"signature_name": "translate", "instances": ["1 " * 40]}
        )
        assert status == 400 and "at most 24 subwords" in answer["error"]
        for url in (f"http://127.0.0.1:{server.rest_port}", f"grpc://127.0.0.1:{server.grpc_port}"):
            run(tmp_path, COMMAND, "predict", url, rows, "--signature", "translate", "-o", "answers.json")
            assert json.loads((tmp_path / "answers.json").read_text())["translation"] == texts


def command(folder, *words, status=0, text=None):
    """Runs `python -m translation`; returns its stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "translation", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(EXAMPLES), "PYTHONIOENCODING": "utf-8"},
        input=text,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr
