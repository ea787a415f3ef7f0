"""Sparse and ragged tensors, which are served as their dense components."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from export_helpers import ask, exported
from export_zoo import ZOO
from keras import layers

from keras_ddl import export, model_state
from keras_ddl.errors import ExportError
from keras_ddl.serving.protocol.status import RequestError


def test_components_have_the_names_of_their_attributes(tmp_path: Path) -> None:
    model, sample = ZOO["sparse_and_ragged"]()
    base = export.write_base_graph(model, tmp_path, sample=sample)
    assert base.record["inputs"] == {
        "words_values": ["float32", [None]],
        "words_indices": ["int64", [None, 2]],
        "words_dense_shape": ["int64", [2]],
        "steps_values": ["float32", [None, 2]],
        "steps_row_splits": ["int64", [None]],
        "bias": ["float32", [None, 1]],
    }
    outputs = {"score", "words_values", "words_indices", "words_dense_shape", "steps_values", "steps_row_splits"}
    assert set(base.record["outputs"]) == outputs
    model_state.save_checkpoint(model, tmp_path, 1, base=base)
    result = export.export_saved_model(tmp_path, tmp_path / "out", validate="here")
    assert "answers 5 rows in this process as the trained model did" in result.proof

    rows = {
        "words_values": np.array([1.0, 2.0], np.float32),
        "words_indices": np.array([[0, 1], [2, 0]]),
        "words_dense_shape": np.array([3, 6]),
        "steps_values": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
        "steps_row_splits": np.array([0, 2, 2, 3]),
        "bias": np.zeros((3, 1), np.float32),
    }
    answers = ask(result.path, **rows)
    dense = np.zeros((3, 6), np.float32)
    dense[0, 1], dense[2, 0] = 1, 2
    ragged = tf.RaggedTensor.from_row_splits(rows["steps_values"], rows["steps_row_splits"])
    expected = model(
        {"words": tf.sparse.from_dense(dense), "steps": ragged, "bias": tf.constant(rows["bias"])}, training=False
    )
    np.testing.assert_allclose(answers["score"], expected["score"], rtol=1e-5)
    np.testing.assert_array_equal(answers["words_indices"], rows["words_indices"])
    np.testing.assert_array_equal(answers["steps_row_splits"], rows["steps_row_splits"])
    for name, wrong, words in [
        ("words_indices", np.array([[0, 1], [3, 0]]), "words_indices must be 0 or more, and below"),
        ("words_indices", np.array([[0, -1], [2, 0]]), "words_indices must be 0 or more"),
        ("words_dense_shape", np.array([3, 1 << 40]), r"words_dense_shape must be \[None, 6\]"),
        ("words_dense_shape", np.array([-1, 6]), "words_"),
        ("steps_row_splits", np.array([], np.int64), "slice index 0"),
        ("steps_row_splits", np.array([0, 2, 1, 3]), "monotonic"),
        ("steps_row_splits", np.array([0, 2, 2, 9]), "(?i)row|split|partition"),
    ]:
        with pytest.raises(RequestError, match=words):
            ask(result.path, **{**rows, name: wrong})


@pytest.mark.long
def test_check_makes_up_valid_components(tmp_path: Path) -> None:
    model, sample = ZOO["sparse_and_ragged"]()
    result = exported(model, tmp_path, sample)
    report = export.check_saved_model(result.path)
    assert report.problems == () and "made up" in report.answers


def test_sparse_inputs_are_parsed_from_examples(tmp_path: Path) -> None:
    x = keras.Input((6,), sparse=True, name="x")
    model = keras.Model(x, layers.Dense(1, name="price")(x))
    with pytest.raises(ExportError, match="fixed shape. Received: input 'x'"):
        export.write_base_graph(model, tmp_path, regress=export.Regress())
    with pytest.raises(ExportError, match="features must have.*'x', SparseTensorSpec.*with a SymbolicTensor"):
        features = {"x": tf.io.FixedLenFeature([6], tf.float32)}
        export.write_base_graph(model, tmp_path, regress=export.Regress(features=features))
    features = {"x": tf.io.SparseFeature("place", "value", tf.float32, 6)}
    result = exported(model, tmp_path, np.eye(6)[:2], {"regress": export.Regress(features=features)})
    example = tf.train.Example()
    example.features.feature["place"].int64_list.value.extend([1, 4])
    example.features.feature["value"].float_list.value.extend([2.0, 3.0])
    answer = ask(result.path, "regress", inputs=[example.SerializeToString()])["outputs"]
    np.testing.assert_allclose(answer, model(np.array([[0, 2, 0, 0, 3, 0]]))[:, 0], rtol=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_ragged_inputs_of_several_dimensions(tmp_path: Path, known: bool) -> None:
    class Sums(keras.Model):
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(shape=(), initializer="ones")

        def call(self, x: Any) -> Any:
            return {"sums": tf.reduce_sum(x, axis=[1, 2]) * self.factor, "all": x}

    sample = tf.ragged.constant([[[1.0], [2.0, 3.0]], [], [[4.0, 5.0]]])
    model = Sums()
    model.build((None, None, None))
    if known:
        options = {"input_signature": tf.RaggedTensorSpec([None, None, None], tf.float32, 2)}
    else:
        options = {}
    base = export.write_base_graph(model, tmp_path, sample=None if known else sample, **options)
    assert list(base.record["inputs"]) == ["x_values", "x_row_splits_0", "x_row_splits_1"]
    model_state.save_checkpoint(model, tmp_path, 1, base=base)
    path = export.export_saved_model(tmp_path, tmp_path / "out", validate="here").path
    splits = [np.array([0, 2, 2, 3]), np.array([0, 1, 3, 5])]
    feed = {"x_values": sample.flat_values.numpy(), "x_row_splits_0": splits[0], "x_row_splits_1": splits[1]}
    answers = ask(path, **feed)
    np.testing.assert_array_equal(answers["sums"], [6, 0, 9])
    np.testing.assert_array_equal(answers["all_row_splits_1"], splits[1])
