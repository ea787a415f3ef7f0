"""KerasHub's backbones with their own layout maps and with those of docs/mesh.md: `make test-all HUB=1`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cut.layouts import axes_of, layout_from_docs, mesh_of_layers
from cut.mesh import Mesh, Position, variables_of

from keras_ddl.compat.tensorflow import tf

hub = pytest.importorskip("keras_hub", reason="KerasHub is not installed: HUB=1")
pytestmark = pytest.mark.long
RNG = np.random.default_rng(4)
VOCABULARY = 16


SIZES = {"vocabulary_size": VOCABULARY, "hidden_dim": 8, "intermediate_dim": 16}
OF_QUERIES = {**SIZES, "num_query_heads": 4, "num_key_value_heads": 2}
OF_POSITIONS = {**SIZES, "num_heads": 4, "max_sequence_length": 8, "dropout": 0.0}


def llama(layers: int) -> keras.Model:
    return hub.models.LlamaBackbone(num_layers=layers, **OF_QUERIES)


def gemma(layers: int) -> keras.Model:
    return hub.models.GemmaBackbone(num_layers=layers, head_dim=4, **OF_QUERIES)


def gpt_2(layers: int) -> keras.Model:
    return hub.models.GPT2Backbone(num_layers=layers, **OF_POSITIONS)


def bert(layers: int) -> keras.Model:
    return hub.models.BertBackbone(num_layers=layers, **OF_POSITIONS)


def on_mesh(make: Callable[[int], keras.Model], layout: Any, shape: Position, layers: int) -> Mesh:
    """Trains a backbone with logits over its vocabulary on a mesh, compares it with one process, and returns the mesh.

    layout: name of a layout in docs/mesh.md; None: the backbone's own get_layout_map.
    """
    keras.utils.set_random_seed(3)
    backbone = make(layers)
    mesh = mesh_of_layers(shape)
    layout_map = type(backbone).get_layout_map(mesh) if layout is None else layout_from_docs(layout, mesh)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(backbone.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = backbone.trainable_variables

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            inputs = {"token_ids": x, "padding_mask": tf.ones_like(x)}
            if "segment_ids" in backbone.input:
                inputs["segment_ids"] = tf.zeros_like(x)
            hidden = backbone(inputs, training=True)
            hidden = hidden["sequence_output"] if isinstance(hidden, dict) else hidden
            result = loss(y, backbone.token_embedding(hidden, reverse=True))
        gradients = tape.gradient(result, [each.value for each in weights])
        optimizer.apply([(g if g is not None else tf.zeros(w.shape)) for g, w in zip(gradients, weights)], weights)
        return result

    batch = [RNG.integers(0, VOCABULARY, (5, 6)).astype("int32") for _ in range(2)]
    made = Mesh(step, batch, shape, variables_of(backbone, optimizer), axes_of(layout_map, backbone.variables, shape))
    return made.check(*batch, steps=2, tolerance=1e-5)  # KerasHub computes positions and softmax in float32


@pytest.mark.parametrize(("make", "shape"), [(llama, (2, 2)), (gemma, (2, 2)), (gemma, (1, 2))])
def test_keras_hub_layout_maps_gather_no_activation(make, shape):
    mesh = on_mesh(make, None, shape, 2)
    gathered = [each for each in mesh.model_reports[0, 0].entries if each.kind == "gather"]
    # Llama's own map cuts query, key and value along the width, so their kernels and gradients are gathered.
    weights = ("BatchMatMulV2", "Assign")
    assert all(each.reason.startswith(weights) for each in gathered), gathered
    assert len(gathered) == (12 if make is llama else 0), gathered


@pytest.mark.parametrize(
    ("make", "layout", "shape"),
    [(llama, "LLAMA", (2, 2)), (gpt_2, "GPT_2", (2, 2)), (gpt_2, "GPT_2", (1, 4)), (bert, "BERT", (2, 2))],
)
def test_layouts_in_docs_have_four_sums_per_block_and_no_gather(make, layout, shape):
    one, two = (on_mesh(make, layout, shape, layers).kinds() for layers in (1, 2))
    assert "gather" not in two, two
    assert two.count("sum") - one.count("sum") == 4, (one, two)
