"""Signatures that take images as files decode them as PIL does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from export_helpers import ask, exported
from export_zoo import rows
from keras import layers
from PIL import Image

from keras_ddl import export
from keras_ddl.errors import ExportError
from keras_ddl.export import EncodedImages


def picture(height: int, width: int, channels: int) -> np.ndarray:
    """Returns a smooth image, which JPEG changes little."""
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
    """Returns a model that outputs its input, and a trained mean."""
    x = keras.Input(shape, name="pixels", dtype=dtype)
    as_floats = layers.Rescaling(1.0, name="seen")(x)
    return keras.Model(x, {"mean": layers.Dense(1)(layers.Flatten()(as_floats)), "seen": as_floats})


def resized(pixels: np.ndarray, size: tuple[int, int], resample: Any = Image.Resampling.BILINEAR) -> np.ndarray:
    """Resizes with PIL, whose filters antialias when an image shrinks, and are the plain ones otherwise."""
    planes = [Image.fromarray(plane.astype(np.float32)) for plane in np.moveaxis(pixels, -1, 0)]
    return np.stack([np.asarray(plane.resize(size[::-1], resample)) for plane in planes], axis=-1)


def test_encoded_images_are_decoded_resized_and_scaled(tmp_path: Path) -> None:
    means, stds = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    at_training = EncodedImages(scale=1 / 255, mean=means, std=stds, antialias=True)
    at_export = EncodedImages(fit="crop", resize="nearest", offset=-1, outputs="seen", bgr=True, name="file_bytes")
    model = identity((12, 10, 3))
    result = exported(
        model, tmp_path, rows(12, 10, 3), {"signatures": {"from_image": at_training}}, signatures={"cropped": at_export}
    )
    assert "encoded images (cropped, from_image), which were made up" in result.proof
    originals = [picture(12, 10, 3), picture(30, 25, 3), picture(9, 40, 3)]
    files = [file_of(each, kind) for each, kind in zip(originals, ("PNG", "JPEG", "PNG"))]
    decoded = [pixels_of(each) for each in files]
    assert np.abs(decoded[1].astype(int) - originals[1]).max() < 12

    answers = ask(result.path, "from_image", image_bytes=files)
    expected = np.stack([(resized(each, (12, 10)) / 255 - means) / stds for each in decoded])
    np.testing.assert_allclose(answers["seen"][[0, 2]], expected[[0, 2]], atol=1e-4)
    # JPEG decoders differ by a few of 256 levels, because TensorFlow's uses the fast transform.
    np.testing.assert_allclose(answers["seen"][1], expected[1], atol=4 / 255 / min(stds))
    np.testing.assert_allclose(answers["mean"], model(answers["seen"], training=False)["mean"], rtol=1e-4, atol=1e-4)

    others = [file_of(originals[0], "BMP"), file_of(originals[0][..., :1], "GIF")]  # GIF holds its gray exactly
    for seen in ask(result.path, "from_image", image_bytes=others)["seen"]:
        np.testing.assert_allclose(seen, expected[0], atol=1e-4)

    answers = ask(result.path, "cropped", file_bytes=files)
    # 9 x 40: the middle 7 columns have the proportions of 12 x 10.
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
def test_encoded_images_fit_the_model_input(
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


def test_invalid_encoded_images_are_refused(tmp_path: Path) -> None:
    def attempt(model: Any, images: Any) -> None:
        export.write_base_graph(model, tmp_path, signatures={"image": images})

    open_size, two = identity((8, 8, 3)), [keras.Input((8, 8, 3), name=name) for name in ("left", "right")]
    with pytest.raises(ExportError, match=r"resizes to the model's height and width.*8 x 8, size=\(9, 9\)"):
        attempt(open_size, EncodedImages(size=(9, 9)))
    x = keras.Input((None, None, 3), name="x")
    with pytest.raises(ExportError, match="input 'x' of open x open, size=None"):
        attempt(keras.Model(x, layers.GlobalAveragePooling2D()(x)), EncodedImages())
    with pytest.raises(ExportError, match=r"\['left', 'right'\] could be an image. Choose one"):
        attempt(keras.Model(two, layers.add(two)), EncodedImages())
    with pytest.raises(ExportError, match=r"each of the 3 channels. Received: \[1, 2\]"):
        attempt(open_size, EncodedImages(mean=[1, 2]))
    with pytest.raises(ExportError, match="resize='cubic', fit='stretch'"):
        EncodedImages(resize="cubic")
    assert list(tmp_path.iterdir()) == []
