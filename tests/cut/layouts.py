"""Networks, and which axis of each weight is cut along the model axis, for tests of meshes."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_ddl.strategy.mesh.layout import VariableLayout

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
        result.update((id(each), found[0]) for each in [weight.value, *slots_of(weight, optimizer)])
    return result


def slots_of(weight: Any, optimizer: Any) -> list[Any]:
    """Returns the tf.Variables of a weight's shape that an optimizer keeps for it."""
    prefix = weight.path.replace("/", "_") + "_"
    slots = optimizer.variables if optimizer is not None else ()
    alike = [each for each in slots if each.path.rpartition("/")[2].startswith(prefix)]
    return [each.value for each in alike if each.shape == weight.shape]


def mesh_of_layers(shape: tuple[int, int]) -> Any:
    """Returns a keras.distribution.DeviceMesh over simulated ranks."""
    devices = [f"rank:{each}" for each in range(shape[0] * shape[1])]
    return keras.distribution.DeviceMesh(shape, ("batch", "model"), devices=devices)


def written_in_docs(name: str, mesh: Any) -> Any:
    """Returns the LayoutMap that docs/mesh.md gives under a name, a dict of the axes by key."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "mesh.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^{name} = \{{.*?^\}}", page, re.MULTILINE | re.DOTALL)
    layout_map = keras.distribution.LayoutMap(mesh)
    for key, axes in ast.literal_eval(text.partition(" = ")[2]).items():
        layout_map[key] = axes
    return layout_map


def axes_of(layout_map: Any, variables: Sequence[Any], shape: tuple[int, int]) -> dict[int, int]:
    """Returns the axis of each variable that a LayoutMap cuts, by id of its value. All keys must match one."""
    layout = VariableLayout(layout_map, shape[0] * shape[1], 0)
    found = {id(each.value): layout.axis_of(each.path, tuple(each.shape)) for each in variables}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout.check_effects()
    return {key: axis for key, axis in found.items() if axis is not None}
