"""A signature that takes images as files: JPEG or PNG bytes, decoded, resized and scaled inside the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export.signatures.saved_graph import InputTransform

_CHANNELS = (1, 3, 4)  # numbers of channels that tf.io.decode_image supports
_METHODS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic")
_FITS = ("stretch", "crop", "pad")


@dataclass(frozen=True)
class EncodedImages:
    """A signature that takes encoded images: [batch] of JPEG or PNG files, or BMP and GIF for 3 channels.

    The graph decodes each image with the model's number of channels, resizes it to the model's height and width,
    computes `(pixel * scale + offset - mean) / std` of pixels 0 to 255, and casts to the input's dtype. The model's
    other inputs stay inputs of the signature.

    Args:
        input: the model's image input; may be left out if only one input has the shape of an image.
        outputs: an output or layer, a list, or a mapping from public names; None: the outputs of `serving_default`.
        resize: 'bilinear', 'nearest', 'bicubic', 'area', 'lanczos3', 'lanczos5', 'gaussian' or 'mitchellcubic'.
        antialias: whether to antialias when an image is made smaller.
        fit: 'stretch' changes the aspect ratio, 'crop' cuts the longer side, 'pad' adds black.
        scale, offset, mean, std: a number, or one for each channel.
        bgr: the model takes channels in the order blue, green, red.
        size: (height, width), for a model that leaves them open.
        name: name of the input that takes the bytes.
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
                f"EncodedImages: resize must be one of {', '.join(_METHODS)}, and fit one of {', '.join(_FITS)}. "
                f"Received: resize={self.resize!r}, fit={self.fit!r}."
            )
        if not self.name.isidentifier():
            raise ExportError(
                f"EncodedImages: name must be an identifier such as 'image_bytes'. Received: {self.name!r}."
            )


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
    """Returns the model's input into which the signature decodes images.

    Args:
        inputs: name -> [dtype, shape].
    Raises: ExportError: no input, or several inputs, fit; or the size is open or differs from `images.size`.
    """
    if images.input is None:
        fitting = [name for name, (dtype, shape) in inputs.items() if _layout(dtype, shape) in ("last", "first")]
        if len(fitting) != 1:
            raise ExportError(
                "EncodedImages needs a model that takes an image, [batch, height, width, channels] with "
                f"{', '.join(map(str, _CHANNELS))} channels. Received: inputs {_listed(inputs)}, where "
                f"{fitting or 'none'} could be an image. "
                + ("Choose one: EncodedImages(input=...)." if fitting else "Leave this signature out.")
            )
        name = fitting[0]
    else:
        name = images.input
    layout = _layout(*inputs[name]) if name in inputs else None
    if layout is None:
        raise ExportError(
            f"EncodedImages needs an input of shape [batch, height, width, channels] with "
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
    if None in size or any(known not in (None, wanted) for known, wanted in zip((height, width), size)):
        raise ExportError(
            "EncodedImages resizes to the model's height and width, or to size= if the model leaves them open. "
            f"Received: input {name!r} of {height or 'open'} x {width or 'open'}, size={images.size}."
        )
    channels = {"last": shape[-1], "first": shape[1], "none": 1}[layout]
    for each in ("scale", "offset", "mean", "std"):
        value = getattr(images, each)
        if not isinstance(value, (int, float)) and len(value) not in (1, channels):
            raise ExportError(
                f"EncodedImages: {each} must be one number, or one number for each of the {channels} channels. "
                f"Received: {list(value)}."
            )
    return ImageInput(name, dtype, size[0], size[1], channels, layout)


def trace_decoder(images: EncodedImages, into: ImageInput) -> InputTransform:
    """Traces the function that decodes files to the model's input. Call it in `isolated`, or without a Strategy."""
    import tensorflow as tf

    decode = tf.function(lambda files: _pixels(files, images, into), autograph=False).get_concrete_function(
        tf.TensorSpec([None], tf.string)
    )
    with tf.Graph().as_default() as graph:  # TensorFlow copies the function and all that it calls into this graph
        decode(tf.compat.v1.placeholder(tf.string, [None]))
    functions = {each.signature.name: each for each in graph.as_graph_def().library.function}
    (entry,) = [node for node in graph.as_graph_def().node if node.op in ("PartitionedCall", "StatefulPartitionedCall")]
    last = functions.pop(entry.attr["f"].func.name)
    return InputTransform(into.name, images.name, "string", [None], [*functions.values(), last])


def _pixels(files: Any, images: EncodedImages, into: ImageInput) -> Any:
    import tensorflow as tf

    target = tf.as_dtype(into.dtype)
    shape = [into.height, into.width, into.channels]

    def one(file: Any) -> Any:
        pixels = tf.io.decode_image(file, channels=into.channels, expand_animations=False)
        pixels.set_shape([None, None, into.channels])
        return tf.ensure_shape(_resized(pixels, images, into), shape)

    batch = tf.map_fn(one, files, fn_output_signature=tf.TensorSpec(shape, tf.float32))
    if images.bgr:
        batch = batch[..., ::-1]
    numbers = {each: tf.constant(getattr(images, each), tf.float32) for each in ("scale", "offset", "mean", "std")}
    batch = (batch * numbers["scale"] + numbers["offset"] - numbers["mean"]) / numbers["std"]
    if not target.is_floating:
        batch = tf.round(batch)
    batch = tf.saturate_cast(batch, target)
    if into.layout == "first":
        batch = tf.transpose(batch, [0, 3, 1, 2])
    return batch[..., 0] if into.layout == "none" else batch


def _resized(pixels: Any, images: EncodedImages, into: ImageInput) -> Any:
    import tensorflow as tf

    size = [into.height, into.width]
    if images.fit == "pad":
        padded = tf.image.resize_with_pad(pixels, *size, method=images.resize, antialias=images.antialias)
        return tf.cast(padded, tf.float32)
    if images.fit == "crop":
        height, width = tf.shape(pixels)[0], tf.shape(pixels)[1]
        # The largest centred part with the aspect ratio of the model's input.
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
