"""Signatures by names, of functions and of encoded images, as TensorFlow Serving sees them and tf.saved_model.load."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from asking import ask
from export_zoo import ZOO, disturb, rows
from keras import layers
from PIL import Image

from keras_ddl import callbacks, export
from keras_ddl.checkpoint import model_state
from keras_ddl.errors import ExportError
from keras_ddl.export import EncodedImages
from keras_ddl.serving.status import RequestError

_random = np.random.default_rng(3)


def exported(model: Any, folder: Path, sample: Any, base: dict[str, Any] | None = None, **options: Any) -> Any:
    """Traces, moves the weights as training would, saves, and exports."""
    written = export.write_base_graph(model, folder, sample=sample, **(base or {}))
    disturb(model)
    saved = model_state.save_checkpoint(model, folder, 1, base=written)
    assert saved.state["base"]["agrees"], saved.state["base"]
    return export.export_saved_model(folder, folder / "out", validate="here", **options)


def two_heads() -> Any:
    """Inputs whose names are not in the order of the layers; a layer that computes in 16 bits."""
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
    told = json.loads((path / "assets.extra" / "keras_ddl_export.json").read_text())
    assert told["signatures"] == ["both", "doubled", "embedding", "serving_default", "submodel"]


class Encoder(keras.Model):
    """Its inputs are known only from its first batch."""

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
    keep = callbacks.Checkpoint(tmp_path, monitor="loss", signatures=signatures)
    model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[keep])
    result = export.export_saved_model(tmp_path, tmp_path / "out", validate="here")
    assert "as the trained model did" in result.proof and "signatures embedding, encode" in result.proof
    expected = model.encode(x, training=False)
    np.testing.assert_allclose(ask(result.path, "embedding", x=x)["vector"], expected, rtol=1e-5)
    np.testing.assert_allclose(ask(result.path, "encode", x=x)["output_0"], expected, rtol=1e-5)


def test_signatures_given_at_export(declared: dict[str, Any]) -> None:
    folder, model, sample = declared["folder"], declared["model"], declared["sample"]
    wanted = {
        "serving_default": ["probabilities", "features"],
        "embedding": {"z": "price", "a": "half"},  # in place of the one of training
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
    assert "not compared: layers, of which training has stored no answers: half" in result.proof
    # The base graph is as it was: another export has what training has declared.
    assert set(ask(export.export_saved_model(folder, folder / "out", validate="here").path, **sample)) == {
        "probabilities",
        "price",
    }
    first, second = (
        tf.saved_model.experimental.read_fingerprint(str(each.path)) for each in (declared["result"], result)
    )
    assert first.signature_def_hash != second.signature_def_hash
    assert first.saved_object_graph_hash != second.saved_object_graph_hash


def test_16_bit_layers_are_answered_as_such_if_wanted(tmp_path: Path) -> None:
    sample = {"x": rows(4), "a_side": rows(2)}
    options = {"float32_outputs": False, "signatures": {"features": "features"}}
    path = exported(two_heads(), tmp_path, sample, options, signatures={"hidden": "half"}).path
    assert ask(path, "hidden", **sample)["half"].dtype == np.float16


def test_a_replaced_signature_leaves_nothing_behind(declared: dict[str, Any]) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    folder = declared["folder"]
    wanted = {"serving_default": "price", "embedding": "price"}
    path = export.export_saved_model(folder, folder / "out", validate="off", signatures=wanted).path
    (graph,) = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes()).meta_graphs
    wrappers = [each.signature.name for each in graph.graph_def.library.function if "wrapper" in each.signature.name]
    assert len(wrappers) == 5 and set(wrappers) == set(graph.object_graph_def.concrete_functions)


def test_a_wrong_answer_of_a_signature_is_found(declared: dict[str, Any], tmp_path: Path) -> None:
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
        ({"classify": "price"}, "'classify', which is there already"),
        ({"2 b": "price"}, "letters, digits.*Received: '2 b'"),
        ({"a": []}, r"the name of an output or of a layer.*'a' with \[\]"),
        ({"a": lambda inputs: inputs}, "in training and not for serving_default"),
        ({"a": EncodedImages()}, r"takes an image.*inputs a_side float32\[None, 2\], x.*of which none"),
        ({"a": EncodedImages(input="x")}, "input='x'; the inputs are"),
        (["price"], "maps names to what they answer. Received: list"),
    ],
)
def test_signatures_that_cannot_be_are_refused_before_anything_is_written(
    declared: dict[str, Any], tmp_path: Path, signatures: Any, words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        export.export_saved_model(declared["folder"], tmp_path / "out", validate="here", signatures=signatures)
    assert not list((tmp_path / "out").glob("*"))


def test_unknown_names_are_refused_in_training(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'a' with \['hiden'\]. There are outputs \['price', .*layers .*'features'"):
        export.write_base_graph(two_heads(), tmp_path, signatures={"a": "hiden"})
    with pytest.raises(ExportError, match=r"that of 'a' failed with KeyError: 'z'"):
        export.write_base_graph(two_heads(), tmp_path, signatures={"a": lambda inputs: inputs["z"]})
    assert list(tmp_path.iterdir()) == []


# ---- sparse and ragged -----------------------------------------------------------------------------------------------


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
        ("words_indices", np.array([[0, 1], [3, 0]]), "words_indices are of 0 or more and below"),
        ("words_indices", np.array([[0, -1], [2, 0]]), "words_indices are of 0 or more"),
        ("words_dense_shape", np.array([3, 1 << 40]), r"words_dense_shape is \[None, 6\]"),
        ("words_dense_shape", np.array([-1, 6]), "words_"),
        ("steps_row_splits", np.array([], np.int64), "slice index 0"),
        ("steps_row_splits", np.array([0, 2, 1, 3]), "monotonic"),
        ("steps_row_splits", np.array([0, 2, 2, 9]), "(?i)row|split|partition"),
    ]:
        with pytest.raises(RequestError, match=words):
            ask(result.path, **{**rows, name: wrong})


@pytest.mark.long
def test_a_check_makes_up_components_that_fit(tmp_path: Path) -> None:
    model, sample = ZOO["sparse_and_ragged"]()
    result = exported(model, tmp_path, sample)
    report = export.check_saved_model(result.path)
    assert report.problems == () and "made up" in report.answers


def test_sparse_inputs_are_parsed_from_examples_where_features_say_how(tmp_path: Path) -> None:
    x = keras.Input((6,), sparse=True, name="x")
    model = keras.Model(x, layers.Dense(1, name="price")(x))
    with pytest.raises(ExportError, match="fixed shape. Received: input 'x'"):
        export.write_base_graph(model, tmp_path, regress=export.Regress())
    with pytest.raises(ExportError, match="parsed as sparse.*'x', SparseTensorSpec.*with a SymbolicTensor"):
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


# ---- encoded images --------------------------------------------------------------------------------------------------


def picture(height: int, width: int, channels: int) -> np.ndarray:
    """Smooth, so that JPEG changes little."""
    ramp = np.linspace(0, 255, height)[:, None, None] * np.linspace(0.2, 1, width)[None, :, None]
    return np.tile(ramp, (1, 1, channels)).astype(np.uint8)


def file_of(pixels: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return buffer.getvalue()


def pixels_of(file: bytes) -> np.ndarray:
    array = np.asarray(Image.open(io.BytesIO(file)))
    return array if array.ndim == 3 else array[..., None]


def identity(shape: tuple[int | None, ...], dtype: str = "float32") -> Any:
    """A model that answers its input, beside something learned."""
    x = keras.Input(shape, name="pixels", dtype=dtype)
    as_floats = layers.Rescaling(1.0, name="seen")(x)
    return keras.Model(x, {"mean": layers.Dense(1)(layers.Flatten()(as_floats)), "seen": as_floats})


def resized(pixels: np.ndarray, size: tuple[int, int], resample: Any = Image.Resampling.BILINEAR) -> np.ndarray:
    """By another library. PIL's filters are those of an antialias when an image shrinks, and the plain ones else."""
    planes = [Image.fromarray(plane.astype(np.float32)) for plane in np.moveaxis(pixels, -1, 0)]
    return np.stack([np.asarray(plane.resize(size[::-1], resample)) for plane in planes], axis=-1)


def test_encoded_images_are_decoded_resized_and_scaled_as_told(tmp_path: Path) -> None:
    means, stds = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    at_training = EncodedImages(scale=1 / 255, mean=means, std=stds, antialias=True)
    at_export = EncodedImages(fit="crop", resize="nearest", offset=-1, outputs="seen", bgr=True, name="file_bytes")
    model = identity((12, 10, 3))
    result = exported(
        model, tmp_path, rows(12, 10, 3), {"signatures": {"from_image": at_training}}, signatures={"cropped": at_export}
    )
    assert "encoded images (cropped, from_image), asked made-up ones" in result.proof
    originals = [picture(12, 10, 3), picture(30, 25, 3), picture(9, 40, 3)]
    files = [file_of(each, kind) for each, kind in zip(originals, ("PNG", "JPEG", "PNG"))]
    decoded = [pixels_of(each) for each in files]
    assert np.abs(decoded[1].astype(int) - originals[1]).max() < 12

    answers = ask(result.path, "from_image", image_bytes=files)
    expected = np.stack([(resized(each, (12, 10)) / 255 - means) / stds for each in decoded])
    np.testing.assert_allclose(answers["seen"][[0, 2]], expected[[0, 2]], atol=1e-4)
    # Decoders of JPEG differ by a few of 256 levels: TensorFlow's takes the fast transform.
    np.testing.assert_allclose(answers["seen"][1], expected[1], atol=4 / 255 / min(stds))
    np.testing.assert_allclose(answers["mean"], model(answers["seen"], training=False)["mean"], rtol=1e-4, atol=1e-4)

    others = [file_of(originals[0], "BMP"), file_of(originals[0][..., :1], "GIF")]  # GIF holds its gray exactly
    for seen in ask(result.path, "from_image", image_bytes=others)["seen"]:
        np.testing.assert_allclose(seen, expected[0], atol=1e-4)

    answers = ask(result.path, "cropped", file_bytes=files)
    # 9 x 40: the middle 7 columns, of which 12 x 10 keeps the proportions.
    cut = decoded[2][:, 16:23]
    nearest = cut[(np.arange(12) + 0.5).astype(int) * 9 // 12][:, ((np.arange(10) + 0.5) * 7 / 10).astype(int)]
    assert answers.keys() == {"seen"} and answers["seen"].shape == (3, 12, 10, 3)
    np.testing.assert_array_equal(answers["seen"][0], decoded[0][..., ::-1].astype(np.float32) - 1)
    np.testing.assert_allclose(answers["seen"][2], nearest[..., ::-1].astype(np.float32) - 1, atol=30)
    assert ask(result.path, "from_image", image_bytes=[])["seen"].shape == (0, 12, 10, 3)
    with pytest.raises(Exception, match="(?i)image"):
        ask(result.path, "from_image", image_bytes=[b"no image"])


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "channels"),
    [
        ((6, 5, 1), "uint8", {}, 1),
        ((6, 5, 4), "int32", {"resize": "nearest"}, 4),
        ((3, 6, 5), "float32", {"input": "pixels"}, 3),
        ((6, 5), "float32", {"input": "pixels"}, 1),
        ((None, None, 3), "float16", {"size": (6, 5), "fit": "pad"}, 3),
    ],
)
def test_encoded_images_become_what_the_model_takes(
    tmp_path: Path, shape: Any, dtype: str, options: Any, channels: int
) -> None:
    x = keras.Input(shape, name="pixels", dtype=dtype)
    seen = layers.Lambda(lambda value: keras.ops.cast(value, "float32"))(x)
    mean = keras.ops.mean(seen, axis=list(range(1, len(shape) + 1)))
    model = keras.Model(x, {"seen": seen, "learned": layers.Dense(1)(keras.ops.expand_dims(mean, 1))})
    sample = np.zeros((2, *(size or 7 for size in shape)), dtype)
    result = exported(model, tmp_path, sample, signatures={"image": EncodedImages(**options)})
    original = picture(6, 5, channels)
    (found,) = ask(result.path, "image", image_bytes=[file_of(original, "PNG")])["seen"]
    expected = np.moveaxis(original, -1, 0) if shape[0] == 3 else original[..., 0] if len(shape) == 2 else original
    np.testing.assert_array_equal(found, expected)


def test_what_encoded_images_cannot_be_is_refused(tmp_path: Path) -> None:
    def attempt(model: Any, images: Any) -> None:
        export.write_base_graph(model, tmp_path, signatures={"image": images})

    open_size, two = identity((8, 8, 3)), [keras.Input((8, 8, 3), name=name) for name in ("left", "right")]
    with pytest.raises(ExportError, match=r"resizes to the model's height and width.*8 x 8, size=\(9, 9\)"):
        attempt(open_size, EncodedImages(size=(9, 9)))
    x = keras.Input((None, None, 3), name="x")
    with pytest.raises(ExportError, match="input 'x' of open x open, size=None"):
        attempt(keras.Model(x, layers.GlobalAveragePooling2D()(x)), EncodedImages())
    with pytest.raises(ExportError, match=r"\['left', 'right'\] could be one. Say which"):
        attempt(keras.Model(two, layers.add(two)), EncodedImages())
    with pytest.raises(ExportError, match=r"each of the 3 channels. Received: \[1, 2\]"):
        attempt(open_size, EncodedImages(mean=[1, 2]))
    with pytest.raises(ExportError, match="resize='cubic', fit='stretch'"):
        EncodedImages(resize="cubic")
    assert list(tmp_path.iterdir()) == []
