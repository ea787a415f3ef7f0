"""Signatures that name outputs or are functions, as TensorFlow Serving and tf.saved_model.load see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from export_helpers import ask, exported
from export_zoo import rows
from keras import layers

from keras_ddl import callbacks, export
from keras_ddl.errors import ExportError
from keras_ddl.export import EncodedImages


def two_heads() -> Any:
    """Returns a model whose input names are not in layer order, with a layer that computes in 16 bits."""
    x, side = keras.Input((4,), name="x"), keras.Input((2,), name="a_side")
    features = layers.Dense(5, activation="relu", name="features")(layers.concatenate([x, side]))
    half = layers.Dense(3, dtype="mixed_float16", name="half")(features)
    outputs = {"probabilities": layers.Softmax()(half), "price": layers.Dense(1, name="head")(features)}
    return keras.Model({"x": x, "a_side": side}, outputs)


def inside(model: Any, layer: str, sample: Any) -> np.ndarray:
    return keras.Model(model.input, model.get_layer(layer).output)(sample, training=False).numpy()


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("declared")
    model, sample = two_heads(), {"x": rows(4), "a_side": rows(2)}
    signatures = {
        "embedding": "features",
        "both": {"vector": "features", "chance": "probabilities"},
        "doubled": lambda inputs: {"twice": inputs["x"] * 2},
        "submodel": keras.Model(model.input, model.get_layer("half").output),
    }
    result = exported(model, folder, sample, {"signatures": signatures})
    return {"folder": folder, "model": model, "sample": sample, "result": result}


def test_signatures_declared_in_training(declared: dict[str, Any]) -> None:
    model, sample, path = declared["model"], declared["sample"], declared["result"].path
    expected = {name: tensor.numpy() for name, tensor in model(sample, training=False).items()}
    features, half = (inside(model, name, sample) for name in ("features", "half"))
    answers = ask(path, **sample)
    assert set(answers) == {"probabilities", "price"}
    np.testing.assert_allclose(answers["price"], expected["price"], rtol=1e-5)
    assert ask(path, "embedding", **sample).keys() == {"features"}
    np.testing.assert_allclose(ask(path, "embedding", **sample)["features"], features, rtol=1e-5)
    answers = ask(path, "both", **sample)
    np.testing.assert_allclose(answers["vector"], features, rtol=1e-5)
    np.testing.assert_allclose(answers["chance"], expected["probabilities"], atol=2e-3)
    np.testing.assert_array_equal(ask(path, "doubled", **sample)["twice"], 2 * sample["x"])
    (answer,) = ask(path, "submodel", **sample).values()
    assert answer.dtype == np.float32, "16-bit floats are cast, as REST needs"
    np.testing.assert_allclose(answer, half, atol=2e-2)
    proof = declared["result"].proof
    assert "as the trained model did" in proof and "so do the signatures both, doubled, embedding, submodel" in proof
    assert "not compared" not in proof
    record = json.loads((path / "assets.extra" / "keras_ddl_export.json").read_text())
    assert record["signatures"] == ["both", "doubled", "embedding", "serving_default", "submodel"]


class Encoder(keras.Model):
    """Knows its inputs only from its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [layers.Dense(4, name="hidden"), layers.Dropout(0.9)]
        self.head = layers.Dense(1)

    def encode(self, x: Any, training: bool = True) -> Any:
        for layer in self.hidden:
            x = layer(x, training=training)
        return x

    def call(self, x: Any, training: bool = True) -> Any:
        return self.head(self.encode(x, training))


def test_checkpoint_declares_signatures_of_a_subclassed_model(tmp_path: Path) -> None:
    model, x = Encoder(), rows(3)
    model.compile("sgd", "mse")
    signatures = {"embedding": {"vector": "hidden"}, "encode": model.encode}
    keep = [callbacks.Checkpoint(tmp_path, monitor="loss"), callbacks.ExportBase(signatures=signatures)]
    model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=keep)
    result = export.export_saved_model(tmp_path, tmp_path / "out", validate="here")
    assert "as the trained model did" in result.proof and "signatures embedding, encode" in result.proof
    expected = model.encode(x, training=False)
    np.testing.assert_allclose(ask(result.path, "embedding", x=x)["vector"], expected, rtol=1e-5)
    np.testing.assert_allclose(ask(result.path, "encode", x=x)["output_0"], expected, rtol=1e-5)


def test_signatures_given_at_export(declared: dict[str, Any]) -> None:
    folder, model, sample = declared["folder"], declared["model"], declared["sample"]
    wanted = {
        "serving_default": ["probabilities", "features"],
        "embedding": {"z": "price", "a": "half"},  # replaces the one declared in training
        "hidden": "half",
    }
    result = export.export_saved_model(folder, folder / "out", validate="here", signatures=wanted)
    answers = ask(result.path, **sample)
    assert set(answers) == {"probabilities", "features"}
    np.testing.assert_allclose(answers["features"], inside(model, "features", sample), rtol=1e-5)
    answers = ask(result.path, "embedding", **sample)
    assert set(answers) == {"z", "a"} and answers["a"].dtype == np.float32
    np.testing.assert_allclose(answers["a"], inside(model, "half", sample), atol=2e-2)
    np.testing.assert_array_equal(ask(result.path, "hidden", **sample)["half"], answers["a"])
    assert set(ask(result.path, "both", **sample)) == {"vector", "chance"}
    assert "not compared: layers whose outputs training did not store: half" in result.proof
    # The base graph is unchanged: the next export has the signatures declared in training.
    assert set(ask(export.export_saved_model(folder, folder / "out", validate="here").path, **sample)) == {
        "probabilities",
        "price",
    }
    first, second = (
        tf.saved_model.experimental.read_fingerprint(str(each.path)) for each in (declared["result"], result)
    )
    assert first.signature_def_hash != second.signature_def_hash
    assert first.saved_object_graph_hash != second.saved_object_graph_hash


def test_16_bit_outputs_are_kept_on_request(tmp_path: Path) -> None:
    sample = {"x": rows(4), "a_side": rows(2)}
    options = {"float32_outputs": False, "signatures": {"features": "features"}}
    path = exported(two_heads(), tmp_path, sample, options, signatures={"hidden": "half"}).path
    assert ask(path, "hidden", **sample)["half"].dtype == np.float16


def test_wrong_output_of_a_signature_is_found(declared: dict[str, Any], tmp_path: Path) -> None:
    from keras_ddl.export import validate_saved_model

    golden = declared["folder"] / "ckpt-00000001" / "golden.npz"
    path = declared["result"].path
    with pytest.raises(ExportError, match="Received: signature both: vector has shape"):
        validate_saved_model(path, golden=golden, signatures={"both": {"vector": "price", "chance": "probabilities"}})
    with pytest.raises(ExportError, match=r"signature both: outputs are \['chance', 'vector'\], not \['vector'\]"):
        validate_saved_model(path, golden=golden, signatures={"both": {"vector": "features"}})


@pytest.mark.parametrize(
    ("signatures", "words"),
    [
        (
            {"a": ["price", "nothing"]},
            r"'a' with \['nothing'\]. There are outputs \['features', 'price', 'prob.*'half'",
        ),
        ({"classify": "price"}, "'classify', which already exists"),
        ({"2 b": "price"}, "letters, digits.*Received: '2 b'"),
        ({"a": []}, r"the name of an output or layer.*'a' with \[\]"),
        ({"a": lambda inputs: inputs}, "in training and not for serving_default"),
        ({"a": EncodedImages()}, r"takes an image.*inputs a_side float32\[None, 2\], x.*where none could be"),
        ({"a": EncodedImages(input="x")}, "input='x'; the inputs are"),
        (["price"], "must map names to outputs. Received: list"),
    ],
)
def test_invalid_signatures_are_refused_before_anything_is_written(
    declared: dict[str, Any], tmp_path: Path, signatures: Any, words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        export.export_saved_model(declared["folder"], tmp_path / "out", validate="here", signatures=signatures)
    assert not list((tmp_path / "out").glob("*"))


def test_unknown_names_are_refused_in_training(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'a' with \['hiden'\]. There are outputs \['price', .*layers .*'features'"):
        export.write_base_graph(two_heads(), tmp_path, signatures={"a": "hiden"})
    with pytest.raises(ExportError, match=r"function of 'a' failed with KeyError: 'z'"):
        export.write_base_graph(two_heads(), tmp_path, signatures={"a": lambda inputs: inputs["z"]})
    assert list(tmp_path.iterdir()) == []
