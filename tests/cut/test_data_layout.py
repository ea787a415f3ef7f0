"""Arguments cut along the model axis as well: each rank of the axis has a part of each sequence or image."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from cut.layouts import TRANSFORMER, transformer
from cut.mesh import mesh_of

layers = keras.layers
RNG = np.random.default_rng(4)
BATCH = [RNG.integers(0, 16, (7, 8)).astype(np.int32) for _ in range(2)]
IMAGES, NUMBERS = RNG.normal(size=(5, 8, 6, 3)), RNG.normal(size=(5, 2))
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.long]  # tests/strategy/mesh_checks.py has a quick test


@pytest.mark.parametrize(
    ("shape", "static"),
    [((1, 4), True), ((2, 2), False)],
)
def test_block_gathers_keys_and_values_of_split_sequences(shape, static):
    keras.utils.set_random_seed(2)
    optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=0.5)
    options = {"static": static, "input_axes": [1, 1], "along_batch": shape[0] > 1}
    model = transformer(length=8, blocks=1)
    mesh = mesh_of(model, BATCH, shape, {}, optimizer=optimizer, loss=CROSS_ENTROPY, **options)
    kinds = mesh.check(*BATCH, steps=2).kinds()
    assert kinds[:2] == ["gather", "gather"] and set(kinds[2:]) == {"sum"} and len(kinds) <= 7, mesh.moved()


def test_weights_may_be_cut_along_the_same_axis():
    model = transformer(length=8, blocks=1)
    mesh_of(model, BATCH, (1, 2), TRANSFORMER, loss=CROSS_ENTROPY, input_axes=[1, 1]).check(*BATCH, steps=2)


@pytest.mark.parametrize("axis", [1, 2])
def test_convolutions_gather_split_images(axis):
    network = [layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
    network += [layers.MaxPooling2D(2), layers.GlobalAveragePooling2D(), layers.Dense(2)]
    model = keras.Sequential([keras.Input((8, 6, 3)), *network])
    mesh = mesh_of(model, [IMAGES, NUMBERS], (1, 2), {}, input_axes=[axis, None])
    assert mesh.check(IMAGES, NUMBERS, steps=2).kinds() == ["gather"]
