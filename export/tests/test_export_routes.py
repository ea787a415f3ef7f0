"""Signatures, weight files, isolation of the trace, and the clean process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from export_zoo import Blocks, disturb, rows
from keras import layers

from keras_ddl import export, model_state
from keras_ddl.errors import ExportError


def dense_model() -> Any:
    x = keras.Input((4,), name="x")
    hidden = layers.BatchNormalization()(layers.Dense(8, activation="relu")(x))
    return keras.Model(x, layers.Dense(3, activation="softmax", name="probabilities")(hidden))


def serve(path: Path, signature: str = "serving_default", **feed: Any) -> dict[str, np.ndarray]:
    loaded = tf.saved_model.load(str(path))
    answers = loaded.signatures[signature](**{name: tf.constant(value) for name, value in feed.items()})
    return {name: answer.numpy() for name, answer in answers.items()}


def test_fingerprints_differ_by_weights_not_by_version(tmp_path: Path) -> None:
    model = dense_model()
    base = export.write_base_graph(model, tmp_path, sample=rows(4))
    for step in (1, 2, 3):
        if step == 3:
            disturb(model)
        model_state.save_checkpoint(model, tmp_path, step, base=base)
    paths = [
        export.export_saved_model(tmp_path, tmp_path / "out", which=step, validate="off").path for step in (1, 2, 3)
    ]
    one, same, other = (tf.saved_model.experimental.read_fingerprint(str(path)) for path in paths)
    assert one.checkpoint_hash == same.checkpoint_hash != other.checkpoint_hash
    assert one.graph_def_program_hash == other.graph_def_program_hash


def test_classify_and_regress_take_examples(tmp_path: Path) -> None:
    words = keras.Input((), dtype="string", name="word")
    number = keras.Input((2,), name="number")
    count = keras.Input((1,), dtype="int32", name="count")
    lookup = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    joined = layers.concatenate([lookup(words), number, layers.Rescaling(0.5)(count)])
    outputs = {"kind": layers.Dense(3, activation="softmax")(joined), "price": layers.Dense(1)(joined)}
    model = keras.Model({"word": words, "number": number, "count": count}, outputs)
    sample = {"word": np.array([b"a", b"z"]), "number": rows(2)[:2], "count": np.array([[3], [4]], "int32")}
    labels = ["red", "green", "blue"]
    base = export.write_base_graph(
        model,
        tmp_path,
        sample=sample,
        classify=export.Classify("kind", labels=labels),
        regress=export.Regress("price"),
    )
    model_state.save_checkpoint(model, tmp_path, 1, base=base)
    path = export.export_saved_model(tmp_path, tmp_path / "out", validate="here").path

    def example(i: int) -> bytes:
        features = {
            "word": tf.train.Feature(bytes_list=tf.train.BytesList(value=[sample["word"][i]])),
            "number": tf.train.Feature(float_list=tf.train.FloatList(value=sample["number"][i])),
            "count": tf.train.Feature(int64_list=tf.train.Int64List(value=sample["count"][i])),
        }
        return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

    expected = serve(path, **sample)
    answers = serve(path, "classify", inputs=[example(0), example(1)])
    np.testing.assert_array_equal(answers["scores"], expected["kind"])
    assert answers["classes"].tolist() == [[label.encode() for label in labels]] * 2
    answers = serve(path, "regress", inputs=[example(0), example(1)])
    np.testing.assert_array_equal(answers["outputs"], expected["price"][:, 0])

    from tensorflow.core.protobuf import saved_model_pb2

    graph = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes()).meta_graphs[0]
    methods = {name: graph.signature_def[name].method_name for name in base.record["signatures"]}
    assert methods == {
        "serving_default": "tensorflow/serving/predict",
        "classify": "tensorflow/serving/classify",
        "regress": "tensorflow/serving/regress",
    }


def test_signatures_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    model = dense_model()
    with pytest.raises(ExportError, match=r"Classify must name one of the model's outputs, \['probabilities'\]"):
        export.write_base_graph(model, tmp_path, classify=export.Classify("scores"))
    with pytest.raises(ExportError, match=r"scores of shape \[batch, 2\]. Received.*\(None, 3\)"):
        export.write_base_graph(model, tmp_path, classify=export.Classify(labels=["a", "b"]))
    with pytest.raises(ExportError, match=r"features must map every input.*Received: \['z'\]; the inputs are \['x'\]"):
        features = {"z": tf.io.FixedLenFeature([4], tf.float32)}
        export.write_base_graph(model, tmp_path, regress=export.Regress(features=features))
    ids = keras.Input((None,), dtype="int64", name="ids")
    open_length = keras.Model(ids, layers.GlobalAveragePooling1D()(layers.Embedding(5, 1)(ids)))
    with pytest.raises(ExportError, match=r"fixed shape. Received: input 'ids' of shape \(None, None\)"):
        export.write_base_graph(open_length, tmp_path, regress=export.Regress())
    features = {"ids": tf.io.VarLenFeature(tf.int64)}
    assert export.write_base_graph(open_length, tmp_path, regress=export.Regress(features=features))


@pytest.mark.parametrize("kind", ["weights.h5", "keras", "checkpoint"])
def test_weights_may_come_from_other_files(tmp_path: Path, kind: str) -> None:
    model = dense_model()
    export.write_base_graph(model, tmp_path / "ckpt")
    disturb(model)
    file = tmp_path / f"saved.{kind}"
    if kind == "weights.h5":
        model.save_weights(file)
    elif kind == "keras":
        model.save(file)
    else:
        file = Path(tf.train.Checkpoint(step=tf.Variable(1), net=model).save(str(tmp_path / "other")))
    x = rows(4)
    result = export.export_saved_model(tmp_path / "ckpt", tmp_path / "out", weights=file, validate="here")
    assert result.step is None and "no outputs of training to compare with" in result.proof
    np.testing.assert_allclose(serve(result.path, x=x)["probabilities"], model(x, training=False), atol=1e-6)


def test_weight_files_of_another_model_are_refused(tmp_path: Path) -> None:
    def attempt(file: Path) -> None:
        export.export_saved_model(tmp_path / "ckpt", tmp_path / "out", weights=file, validate="here")

    model = Blocks()
    model(rows(5))
    export.write_base_graph(model, tmp_path / "ckpt", sample=rows(5))
    with pytest.raises(
        ExportError, match=r"takes a \.weights\.h5 or \.keras file or a TensorFlow checkpoint.*no absent"
    ):
        attempt(tmp_path / "absent")
    (tmp_path / "cut.weights.h5").write_bytes(b"\x89HDF")
    with pytest.raises(ExportError, match=r"takes an intact .*cut\.weights\.h5: OSError"):
        attempt(tmp_path / "cut.weights.h5")
    other = dense_model()
    other.save_weights(tmp_path / "other.weights.h5")
    with pytest.raises(ExportError, match=r"of the model that wrote the base graph.*without \d+ variables"):
        attempt(tmp_path / "other.weights.h5")
    model.save_weights(tmp_path / "good.weights.h5")
    attempt(tmp_path / "good.weights.h5")


class Witness(layers.Layer):
    """Records whether a Strategy is active, which could create a variable, and so a collective, on one rank."""

    def call(self, x: Any) -> Any:
        self.saw_strategy = tf.distribute.has_strategy()
        return x


def test_trace_is_isolated_from_its_surroundings(tmp_path: Path) -> None:
    witness = Witness()
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense_model(), witness])
            with tf.device("/device:GPU:7"), tf.name_scope("training"):
                base = export.write_base_graph(model, tmp_path)
            assert witness.saw_strategy is False
            model_state.save_checkpoint(model, tmp_path, 1, base=base)
    finally:
        keras.config.set_dtype_policy("float32")
    assert base.record["half"] and base.record["outputs"]["output_0"][0] == "float32"
    result = export.export_saved_model(tmp_path, tmp_path / "out", validate="here")
    assert "as the trained model did" in result.proof
    graph = (result.path / "saved_model.pb").read_bytes()
    assert b"GPU:7" not in graph and b"training/" not in graph


def test_base_graph_does_not_change_training(tmp_path: Path) -> None:
    class Noisy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.seed = keras.random.SeedGenerator(3)
            self.lstm = layers.LSTM(2)

        def call(self, x: Any) -> Any:
            return self.lstm(x) + keras.random.normal((1, 2), seed=self.seed)

    model = Noisy()
    model(rows(3, 4))
    cudnn = model.lstm.use_cudnn
    before = [each.numpy() for each in model.variables]
    base = export.write_base_graph(model, tmp_path, sample=rows(3, 4))
    base.evidence()
    assert base.record["random"] == [], "from one seed state, the same draw"
    for old, now in zip(before, model.variables):
        np.testing.assert_array_equal(old, now.numpy())
    assert model.lstm.use_cudnn == cudnn
    model_state.save_checkpoint(model, tmp_path, 1, base=base)
    assert "as the trained model did" in export.export_saved_model(tmp_path, tmp_path / "out", validate="here").proof


def test_model_that_runs_only_in_a_graph_keeps_its_checkpoints(tmp_path: Path) -> None:
    class GraphOnly(keras.Model):
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(shape=(), initializer="ones")

        def call(self, x: Any) -> Any:
            if tf.executing_eagerly():
                raise RuntimeError("not eagerly")
            return x * self.factor

    model = GraphOnly()
    model.build((None, 3))
    base = export.write_base_graph(model, tmp_path, sample=rows(3))
    saved = model_state.save_checkpoint(model, tmp_path, 1, base=base)
    assert saved.state["base"] == {"agrees": None, "problems": ["the live model did not answer: RuntimeError"]}
    assert "as the trained model did" in export.export_saved_model(tmp_path, tmp_path / "out", validate="here").proof


def test_subclassed_model_is_traced_after_its_first_batch(tmp_path: Path) -> None:
    model = Blocks()
    model.compile("sgd", "mse")
    assert not export.inputs_are_known(model)
    export.record_inputs(model)
    export.record_inputs(model)  # calling it twice is harmless
    model.fit(rows(5), rows(2), batch_size=2, verbose=0)
    assert export.inputs_are_known(model) and "call" not in vars(model)
    base = export.write_base_graph(model, tmp_path)
    assert base.record["inputs"] == {"x": ["float32", [None, 5]]}


@pytest.mark.parametrize("recorded", [True, False])
def test_clean_process_uses_training_thread_count(tmp_path: Path, recorded: bool) -> None:
    # Matrix products split their sums by the number of threads, so another number may change the last bits.
    model = dense_model()
    base = export.write_base_graph(model, tmp_path, sample=rows(4))
    golden = model_state.save_checkpoint(model, tmp_path, 1, base=base).path / model_state.GOLDEN
    path = export.export_saved_model(tmp_path, tmp_path / "out", validate="off").path
    with np.load(golden) as archive:
        arrays = dict(archive)
    cores = len(os.sched_getaffinity(0))
    assert arrays.pop("threads") == (tf.config.threading.get_intra_op_parallelism_threads() or cores)
    # Without the record, as in a checkpoint of an older version.
    np.savez(tmp_path / "golden.npz", **arrays, **({"threads": cores + 1} if recorded else {}))
    with export.CleanProcess() as process:
        answer = export.validate_saved_model(path, golden=tmp_path / "golden.npz", process=process)
    assert answer["threads"] == cores + recorded and answer["rows"] == 5
