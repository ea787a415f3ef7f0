"""ResNet-8 (He et al. 2016, arXiv 1512.03385): a convolution, three stages of one residual block each, a classifier."""

from __future__ import annotations

from typing import Any

import keras

layers = keras.layers


def resnet(size: int, classes: int, width: int = 16, blocks: int = 1, last_gamma: str = "zeros") -> keras.Model:
    """Returns a model from images, uint8 [rows, size, size, 3], to logits [rows, classes]; 6 * blocks + 2 layers.

    Args:
        width: channels of the first stage; each further stage has twice as many.
        blocks: residual blocks of a stage.
        last_gamma: initializer of the scale of a block's last BatchNormalization. With zeros, a block begins as the
            identity, as for large batches (Goyal et al. 2017, arXiv 1706.02677, section 5.1).
    """
    image = keras.Input((size, size, 3), dtype="uint8", name="image")
    x = layers.Rescaling(1 / 64, offset=-2)(image)
    x = _normalized(_convolution(width, 3, 2)(x))
    for stage in range(3):
        for block in range(blocks):
            x = _block(x, width << stage, 2 if stage and not block else 1, last_gamma)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(classes, name="logits")(x), name=f"resnet{6 * blocks + 2}")


def _block(x: Any, channels: int, strides: int, last_gamma: str) -> Any:
    y = _normalized(_convolution(channels, 3, strides)(x))
    y = layers.BatchNormalization(gamma_initializer=last_gamma, momentum=0.9)(_convolution(channels, 3, 1)(y))
    if strides > 1:
        x = layers.BatchNormalization(momentum=0.9)(_convolution(channels, 1, strides)(x))
    return layers.ReLU()(layers.Add()([x, y]))


def _convolution(channels: int, kernel: int, strides: int) -> layers.Layer:
    decay = keras.regularizers.L2(5e-5)
    initializer = "he_normal"
    return layers.Conv2D(
        channels, kernel, strides, "same", use_bias=False, kernel_initializer=initializer, kernel_regularizer=decay
    )


def _normalized(x: Any) -> Any:
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
