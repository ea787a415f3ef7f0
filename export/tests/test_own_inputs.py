"""Signatures that are functions with their own inputs: a model of ids that clients call with words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from export_helpers import ask, exported
from keras import layers

from keras_ddl import export
from keras_ddl.errors import ExportError
from keras_ddl.export import Function
from keras_ddl.export.warmup import FILE
from keras_ddl.serving.prediction.servable import Servable

WORDS = ["", "eins", "zwei", "drei"]
SENTENCES = ["eins zwei", "", "drei vier eins ", "zwei"]


class InWords(tf.Module):
    """Maps words to ids with a table that is no attribute of the model, and repeats its outputs in a loop."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        known = tf.lookup.KeyValueTensorInitializer(WORDS, tf.range(len(WORDS), dtype=tf.int64))
        self.table = tf.lookup.StaticHashTable(known, -1)

    def ids(self, text: Any) -> Any:
        return tf.maximum(self.table.lookup(tf.strings.split(text, " ").to_tensor()), 0)

    @tf.function
    def call(self, text: Any, times: Any) -> Any:
        answered = self.model(self.ids(text), training=False)
        repeated = tf.fill([tf.shape(text)[0]], "")
        for _ in tf.range(tf.reduce_max(times)):
            repeated = repeated + text
        return {"text": repeated, "sums": answered}

    def plain(self, text: Any) -> Any:
        return tf.strings.length(text), self.ids(text)


def ids_model() -> Any:
    return keras.Sequential([keras.Input((None,), dtype="int64", name="ids"), layers.Embedding(4, 2), layers.Dense(1)])


@pytest.fixture(scope="module")
def exported_in_words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, model = tmp_path_factory.mktemp("words"), ids_model()
    words = InWords(model)
    sample = {"text": SENTENCES, "times": np.array([2], np.int32)}
    signatures = {
        "in_words": Function(words.call, sample),
        "lengths": Function(words.plain, {"text": ["a b c"]}, {"text": tf.TensorSpec([None], tf.string)}),
        "embedding": "embedding",
    }
    model.layers[0].name = "embedding"
    result = exported(model, folder, np.array([[0, 1], [2, 3]]), {"signatures": signatures})
    return {"folder": folder, "words": words, "result": result}


def test_own_input_function_is_served(exported_in_words: dict[str, Any]) -> None:
    words, path = exported_in_words["words"], exported_in_words["result"].path
    for text in (SENTENCES, ["zwei drei"], ["", "äöü"]):
        answers = ask(path, "in_words", text=text, times=np.array([3], np.int32))
        assert answers["text"].tolist() == [3 * each.encode() for each in text]
        np.testing.assert_allclose(answers["sums"], words.call(tf.constant(text), tf.constant([3]))["sums"], rtol=1e-5)
        lengths = ask(path, "lengths", text=text)
        assert lengths["output_0"].tolist() == [len(each.encode()) for each in text]
        np.testing.assert_array_equal(lengths["output_1"], words.ids(text))
    ids = np.array([[1, 2, 3]])
    np.testing.assert_allclose(ask(path, ids=ids)["output_0"], words.model(ids), rtol=1e-5)
    assert ask(path, "embedding", ids=ids)["embedding"].shape == (1, 3, 2)


def test_own_input_function_is_checked_in_a_clean_process(exported_in_words: dict[str, Any]) -> None:
    folder = exported_in_words["folder"]
    result = export.export_saved_model(folder, folder / "out")
    assert "answers 2 rows in a clean process as the trained model did, bit for bit" in result.proof
    assert "so do the signatures embedding, in_words, lengths" in result.proof and "not compared" not in result.proof
    record = json.loads((result.path / "assets.extra" / "keras_ddl_export.json").read_text())
    assert record["signatures"] == ["embedding", "in_words", "lengths", "serving_default"] and set(
        record["inputs"]
    ) == {"ids"}
    # Weights from another file have no stored outputs, but the samples are still run.
    exported_in_words["words"].model.save_weights(folder / "other.weights.h5")
    result = export.export_saved_model(folder, folder / "out", validate="here", weights=folder / "other.weights.h5")
    assert "answers 2 rows in this process; no outputs of training to compare with; so do" in result.proof


def test_own_input_function_with_wrong_output_is_refused(exported_in_words: dict[str, Any], tmp_path: Path) -> None:
    with np.load(exported_in_words["folder"] / "ckpt-00000001" / "golden.npz") as golden:
        arrays = dict(golden)
    assert {"rows:ids", "rows:in_words/text", "rows:in_words/times", "answers:in_words/text"} < set(arrays)
    arrays["answers:in_words/text"] = np.array([b"a", *arrays["answers:in_words/text"][1:]])
    np.savez(tmp_path / "golden.npz", **arrays)
    with pytest.raises(ExportError, match="signature in_words: text differs in 1 of 4 values"):
        export.validate_saved_model(
            exported_in_words["result"].path,
            golden=tmp_path / "golden.npz",
            signatures={"in_words": {"text": "in_words/text", "sums": "in_words/sums"}},
            own_inputs={"in_words": ["text", "times"], "lengths": ["text"]},
        )


def test_own_input_function_gets_warmup_request(exported_in_words: dict[str, Any]) -> None:
    from tensorflow_serving.apis import prediction_log_pb2

    file = exported_in_words["result"].path / "assets.extra" / FILE
    logs = [
        prediction_log_pb2.PredictionLog.FromString(each)
        for each in tf.data.TFRecordDataset(str(file)).as_numpy_iterator()
    ]
    requests = {each.predict_log.request.model_spec.signature_name: each.predict_log.request.inputs for each in logs}
    assert {name: set(inputs) for name, inputs in requests.items()} == {
        "serving_default": {"ids"},
        "in_words": {"text", "times"},
        "lengths": {"text"},
    }
    assert list(requests["in_words"]["text"].string_val) == [each.encode() for each in SENTENCES]


def test_export_may_replace_own_input_signature(exported_in_words: dict[str, Any], tmp_path: Path) -> None:
    folder = exported_in_words["folder"]
    result = export.export_saved_model(folder, tmp_path, validate="here", signatures={"in_words": "output_0"})
    assert "so do the signatures embedding, in_words, lengths" in result.proof
    assert ask(result.path, "in_words", ids=np.array([[1]]))["output_0"].shape == (1, 1, 1)
    servable = Servable(result.path, "model", 1)
    assert set(servable.signature("lengths").inputs) == {"text"}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Function(lambda text: text, {}), r"rows for each input, by name.*sample of dict with \[\]"),
        (Function(lambda text: text, ["a"]), "sample of list"),
        (Function(lambda text: text, {"a text": ["a"]}), r"\['a text'\]"),
        (Function(lambda text: text, {"text": ["a"]}, {"x": tf.TensorSpec([None])}), r"input_signature with \['x'\]"),
        (
            Function(lambda text: text, {"text": ["a"]}, {"text": tf.TensorSpec([None, 3], tf.string)}),
            r"'text' takes, \(None, 3\)",
        ),
        (Function(lambda x: x, {"text": ["a"]}), "called with its sample's inputs by name.*'f' failed with TypeError"),
        (
            Function(lambda text: tf.io.decode_raw(text, "int16"), {"text": ["abc"]}),
            "must run on its sample.*'f' failed",
        ),
        (Function(tf.strings.length, {"input": ["a"]}), None),
    ],
)
def test_invalid_functions_are_refused(tmp_path: Path, function: Any, words: str | None) -> None:
    if words is None:
        export.write_base_graph(ids_model(), tmp_path, signatures={"f": function})
        return
    with pytest.raises(ExportError, match=words):
        export.write_base_graph(ids_model(), tmp_path, signatures={"f": function})
    assert list(tmp_path.iterdir()) == []
