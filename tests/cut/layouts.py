"""Networks, and which axis of each weight is cut along the model axis, for tests of meshes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from cut.mesh import Mesh, Position

from keras_ddl.compat.tensorflow import tf

Loss = Callable[[Any, Any], Any]
Rules = Mapping[str, int]  # a regular expression over paths of weights -> an axis

# As in Megatron-LM (arXiv 1909.08053): heads and features are cut where they begin, and summed where they end.
TRANSFORMER: Rules = {
    "attention.*(query|key|value)/kernel": 1,
    "attention.*(query|key|value)/bias": 0,
    "attention.*attention_output/kernel": 0,
    "up.*/kernel": 1,
    "up.*/bias": 0,
    "down.*/kernel": 0,
}


def transformer(
    *, vocabulary: int = 16, width: int = 8, heads: int = 4, features: int = 12, length: int = 5, drop: float = 0.1,
    blocks: int = 2,
) -> keras.Model:  # fmt: skip
    layers = keras.layers
    x = inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, name="table")(x)
    for n in range(blocks):
        h = layers.LayerNormalization(name=f"first{n}")(x)
        h = layers.MultiHeadAttention(heads, width // heads, name=f"attention{n}")(h, h, use_causal_mask=True)
        x += layers.Dropout(drop, seed=3 + n)(h)
        h = layers.LayerNormalization(name=f"second{n}")(x)
        h = layers.Dense(features, activation="gelu", name=f"up{n}")(h)
        x += layers.Dense(width, name=f"down{n}")(h)
    return keras.Model(inputs, layers.Dense(vocabulary, name="head")(x))


def axes(weights: Sequence[Any], optimizer: Any, rules: Rules) -> dict[int, int]:
    """Returns the axis of each variable that is cut, by id of its value; slots follow their weight."""
    result: dict[int, int] = {}
    for weight in weights:
        found = [axis for pattern, axis in rules.items() if re.search(pattern, weight.path)]
        if not found:
            continue
        result[id(weight.value)] = found[0]
        prefix = weight.path.replace("/", "_") + "_"
        for slot in optimizer.variables if optimizer is not None else ():
            if slot.path.rpartition("/")[2].startswith(prefix) and slot.shape == weight.shape:
                result[id(slot.value)] = found[0]
    return result


def mesh_of(
    model: keras.Model,
    optimizer: Any,
    loss: Loss,
    batch: Sequence[np.ndarray],
    shape: Position,
    rules: Rules,
    **options: Any,
) -> Mesh:
    """Returns a training step of a model on a mesh."""
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            result = loss(y, model(x, training=True))
            scaled = optimizer.scale_loss(result)
        gradients = tape.gradient(scaled, [each.value for each in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return result

    variables = list({id(each.value): each.value for each in model.variables + optimizer.variables}.values())
    return Mesh(step, batch, shape, variables, axes(model.trainable_variables, optimizer, rules), **options)
