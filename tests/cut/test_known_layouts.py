"""Layouts in docs/mesh.md for networks of plain Keras: their collectives along the model axis."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from cut.layouts import axes_of, layout_from_docs, mesh_of_layers
from cut.mesh import mesh_of

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.long]


def test_resnet_has_two_sums_per_block_and_no_gather():
    keras.utils.set_random_seed(1)
    shape = (1, 2)
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None)
    rng = np.random.default_rng(2)
    batch = [rng.normal(size=(3, 64, 64, 3)), rng.integers(0, 10, (3,))]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    layout = axes_of(layout_from_docs("RESNET", mesh_of_layers(shape)), model.variables, shape)
    mesh = mesh_of(model, batch, shape, layout=layout, optimizer=keras.optimizers.SGD(0.01), loss=loss)
    mesh.check(*batch, steps=1, tolerance=1e-8)
    assert mesh.kinds() == ["sum"] * 2 * 16, mesh.model_reports[0, 0].text()
