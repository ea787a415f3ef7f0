"""A signature that takes images as files: JPEG or PNG bytes, decoded, resized and scaled inside the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export.signatures.saved_graph import Before

_CHANNELS = (1, 3, 4)  # what tf.io.decode_image makes
_METHODS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic")
_FITS = ("stretch", "crop", "pad")


@dataclass(frozen=True)
class EncodedImages:
    """A signature that takes encoded images, [batch] of JPEG or PNG files; for 3 channels BMP and GIF, too.

    Each is decoded with as many channels as the model takes, resized to the model's height and width, and made
    `(pixel * scale + offset - mean) / std` of the input's dtype; pixels are 0 to 255. A model's other inputs stay.

    Args:
        input: the model's input that is the image; may be left out if one alone has the shape of one.
        outputs: as of a signature by names; None: those of `serving_default`.
        resize: 'bilinear', 'nearest', 'bicubic', 'area', 'lanczos3', 'lanczos5', 'gaussian' or 'mitchellcubic'.
        antialias: when an image is made smaller.
        fit: 'stretch' changes the proportions, 'crop' cuts what is too long, 'pad' adds black.
        scale, offset, mean, std: a number, or one for each channel.
        bgr: the model takes blue first.
        size: (height, width), of a model that leaves them open.
        name: of the input that takes the bytes.
    """

    input: str | None = None
    outputs: str | Sequence[str] | Mapping[str, str] | None = None
    resize: str = "bilinear"
    antialias: bool = False
    fit: str = "stretch"
    scale: float | Sequence[float] = 1.0
    offset: float | Sequence[float] = 0.0
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0
    bgr: bool = False
    size: tuple[int, int] | None = None
    name: str = "image_bytes"

    def __post_init__(self) -> None:
        if self.resize not in _METHODS or self.fit not in _FITS:
            raise ExportError(
                f"EncodedImages takes resize of {', '.join(_METHODS)} and fit of {', '.join(_FITS)}. Received: "
                f"resize={self.resize!r}, fit={self.fit!r}."
            )
        if not self.name.isidentifier():
            raise ExportError(f"EncodedImages takes a name like 'image_bytes' for its input. Received: {self.name!r}.")


@dataclass(frozen=True)
class ImageInput:
    """An input that is an image: [batch, height, width, channels], or channels before height, or no channels."""

    name: str
    dtype: str
    height: int
    width: int
    channels: int
    layout: str  # "last", "first" or "none"


def image_input(images: EncodedImages, inputs: Mapping[str, Any]) -> ImageInput:
    """Returns the input that `images` are for.

    Args:
        inputs: name -> [dtype, shape].
    Raises: ExportError: there is none, or more than one, or its size is open, or is not what is asked for.
    """
    if images.input is None:
        fitting = [name for name, (dtype, shape) in inputs.items() if _layout(dtype, shape) in ("last", "first")]
        if len(fitting) != 1:
            raise ExportError(
                f"EncodedImages is for a model that takes an image, [batch, height, width, channels] with "
                f"{', '.join(map(str, _CHANNELS))} channels. Received: inputs {_listed(inputs)}, of which "
                f"{fitting or 'none'} could be one. "
                + ("Say which: EncodedImages(input=...)." if fitting else "Leave this signature out.")
            )
        name = fitting[0]
    else:
        name = images.input
    layout = _layout(*inputs[name]) if name in inputs else None
    if layout is None:
        raise ExportError(
            f"EncodedImages is for an input of shape [batch, height, width, channels] with "
            f"{', '.join(map(str, _CHANNELS))} channels, or [batch, height, width]. Received: input={name!r}; the "
            f"inputs are {_listed(inputs)}."
        )
    if images.name != name and images.name in inputs:
        raise ExportError(
            f"EncodedImages needs a unique name for its input. Received: {images.name!r}; the inputs are "
            f"{_listed(inputs)}. Give name=."
        )
    dtype, shape = inputs[name]
    height, width = {"last": shape[1:3], "first": shape[2:4], "none": shape[1:3]}[layout]
    size = images.size or (height, width)
    if None in size or any(known not in (None, asked) for known, asked in zip((height, width), size)):
        raise ExportError(
            f"EncodedImages resizes to the model's height and width, or, where these are open, to size=. Received: "
            f"input {name!r} of {height or 'open'} x {width or 'open'}, size={images.size}."
        )
    found = ImageInput(name, dtype, size[0], size[1], {"last": shape[-1], "first": shape[1], "none": 1}[layout], layout)
    for each in ("scale", "offset", "mean", "std"):
        value = getattr(images, each)
        if not isinstance(value, (int, float)) and len(value) not in (1, found.channels):
            raise ExportError(
                f"EncodedImages takes for {each} a number, or one for each of the {found.channels} channels. "
                f"Received: {list(value)}."
            )
    return found


def before(images: EncodedImages, into: ImageInput) -> Before:
    """Returns what makes the input out of files. It must be traced in `isolated`, or where no Strategy is."""
    import tensorflow as tf

    decode = tf.function(lambda files: _pixels(files, images, into), autograph=False).get_concrete_function(
        tf.TensorSpec([None], tf.string)
    )
    with tf.Graph().as_default() as graph:  # in which TensorFlow collects it with all that it calls
        decode(tf.compat.v1.placeholder(tf.string, [None]))
    functions = {each.signature.name: each for each in graph.as_graph_def().library.function}
    (entry,) = [node for node in graph.as_graph_def().node if node.op in ("PartitionedCall", "StatefulPartitionedCall")]
    last = functions.pop(entry.attr["f"].func.name)
    return Before(into.name, images.name, "string", [None], [*functions.values(), last])


def _pixels(files: Any, images: EncodedImages, into: ImageInput) -> Any:
    import tensorflow as tf

    target = tf.as_dtype(into.dtype)
    shape = [into.height, into.width, into.channels]

    def one(file: Any) -> Any:
        pixels = tf.io.decode_image(file, channels=into.channels, expand_animations=False)
        pixels.set_shape([None, None, into.channels])
        return tf.ensure_shape(_resized(pixels, images, into), shape)

    found = tf.map_fn(one, files, fn_output_signature=tf.TensorSpec(shape, tf.float32))
    if images.bgr:
        found = found[..., ::-1]
    numbers = {each: tf.constant(getattr(images, each), tf.float32) for each in ("scale", "offset", "mean", "std")}
    found = (found * numbers["scale"] + numbers["offset"] - numbers["mean"]) / numbers["std"]
    if not target.is_floating:
        found = tf.round(found)
    found = tf.saturate_cast(found, target)
    if into.layout == "first":
        found = tf.transpose(found, [0, 3, 1, 2])
    return found[..., 0] if into.layout == "none" else found


def _resized(pixels: Any, images: EncodedImages, into: ImageInput) -> Any:
    import tensorflow as tf

    size = [into.height, into.width]
    if images.fit == "pad":
        padded = tf.image.resize_with_pad(pixels, *size, method=images.resize, antialias=images.antialias)
        return tf.cast(padded, tf.float32)
    if images.fit == "crop":
        height, width = tf.shape(pixels)[0], tf.shape(pixels)[1]
        # The largest part from the middle that has the proportions of the model's input.
        tall = tf.minimum(height, tf.maximum(1, width * into.height // into.width))
        wide = tf.minimum(width, tf.maximum(1, height * into.width // into.height))
        top, left = (height - tall) // 2, (width - wide) // 2
        pixels = pixels[top : top + tall, left : left + wide]
    return tf.cast(tf.image.resize(pixels, size, method=images.resize, antialias=images.antialias), tf.float32)


def _layout(dtype: str, shape: Sequence[int | None] | None) -> str | None:
    if not dtype.startswith(("float", "bfloat", "int", "uint")) or shape is None or len(shape) not in (3, 4):
        return None
    if len(shape) == 3:
        return "none"
    return "last" if shape[3] in _CHANNELS else "first" if shape[1] in _CHANNELS else None


def _listed(inputs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {dtype}{shape}" for name, (dtype, shape) in inputs.items())


def option_names() -> list[str]:
    """Returns what `EncodedImages` takes, for the command line."""
    return [each.name for each in fields(EncodedImages) if each.name != "outputs"]
