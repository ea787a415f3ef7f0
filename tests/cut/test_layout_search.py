"""The choice of a layout (`Strategy(layout=N)`), without ranks; tests/strategy/mesh_choice_checks.py uses ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from cut.layouts import slots_of, transformer
from cut.mesh import Mesh, Position, variables_of

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Program, Sharded
from keras_ddl.cut.axes.layout_search import Unit, choose

layers = keras.layers
RNG = np.random.default_rng(4)

pytestmark = pytest.mark.usefixtures("float64")


class Chosen:
    """The layout chosen for a training step of a model, or for its loss alone.

    Attributes: axes: {path of a weight: axis}.
    """

    def __init__(
        self, model: keras.Model, batch: Sequence[np.ndarray], loss: Any = None, *, trains: bool = True,
        static: bool = True, size: int = 2,
    ) -> None:  # fmt: skip
        self.model, self.batch, self.size = model, batch, size
        loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=0.5)
        self.optimizer.build(model.trainable_variables)
        weights = model.trainable_variables

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                result = loss(y, model(x, training=trains))
            if trains:
                self.optimizer.apply(tape.gradient(result, [each.value for each in weights]), weights)
            return result

        self.step = step
        specs = [tf.TensorSpec([len(each) if static else None, *each.shape[1:]], each.dtype) for each in batch]
        traced = tf.function(step, autograph=False).get_concrete_function(*specs)
        program = Program(traced.graph)
        values = {id(outer): value for value, outer in program.captured}
        self.units = []
        for each in model.variables:
            handles = tuple(values[id(v.handle)] for v in self._kept(each) if id(v.handle) in values)
            if handles and each.shape and each.value.dtype.is_floating:
                size = 8 * len(handles) * int(np.prod(each.shape))
                self.units.append(Unit(each.path, tuple(each.shape), size, handles))
        self.axes = {u.path: a for u, a in choose(program, self.units, size, [Sharded(0)] * len(batch)).items()}

    def _kept(self, weight: Any) -> list[Any]:
        return [weight.value, *slots_of(weight, self.optimizer)]

    def check_on(self, shape: Position) -> Mesh:
        """Returns the step on a mesh, after comparing it with one process."""
        weights = [each for each in self.model.variables if each.path in self.axes]
        layout = {id(v): self.axes[each.path] for each in weights for v in self._kept(each)}
        return Mesh(self.step, self.batch, shape, variables_of(self.model, self.optimizer), layout).check(
            *self.batch, steps=2
        )


def tokens() -> list[np.ndarray]:
    return [RNG.integers(0, 16, (7, 5)).astype("int32") for _ in range(2)]


def block_axes(number: int) -> dict[str, int]:
    names = ("query", "key", "value")
    head_axes = {f"{name}/kernel": 1 for name in names} | {f"{name}/bias": 0 for name in names}
    attention = {
        f"attention{number}/{path}": axis for path, axis in {**head_axes, "attention_output/kernel": 0}.items()
    }
    return {**attention, f"up{number}/kernel": 1, f"up{number}/bias": 0, f"down{number}/kernel": 0}


VOCABULARY = {"table/embeddings": 0, "head/kernel": 1, "head/bias": 0}
LONG = pytest.mark.long


@LONG
@pytest.mark.parametrize("options", [{"trains": False}, {"static": False}], ids=str)
def test_transformer_is_cut_as_in_megatron(options):
    keras.utils.set_random_seed(5)
    chosen = Chosen(transformer(blocks=2, width=16, features=32), tokens(), **options)
    assert chosen.axes == {**block_axes(0), **block_axes(1), **VOCABULARY}


@LONG
def test_step_with_a_chosen_layout_equals_one_process_without_gathers():
    keras.utils.set_random_seed(5)
    mesh = Chosen(transformer(blocks=1), tokens()).check_on((2, 2))
    assert "gather" not in mesh.kinds(), mesh.model_reports[0, 0].text()


@LONG
def test_convolutions_are_cut_in_pairs_including_layers_between():
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(32, 3, padding="same", name="wide")(x)
    x = layers.ReLU()(layers.BatchNormalization(name="norm")(x))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(5, 3, name="narrow")(x))
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    chosen = Chosen(model, [RNG.normal(size=(5, 6, 6, 3)), RNG.integers(0, 3, (5,))])
    between = {f"norm/{each}": 0 for each in ("gamma", "beta", "moving_mean", "moving_variance")}
    assert chosen.axes == {"wide/kernel": 3, "wide/bias": 0, **between, "narrow/kernel": 2}
    mesh = chosen.check_on((1, 2))
    assert "gather" not in mesh.kinds(), mesh.model_reports[0, 0].text()


def stack(*widths: int) -> keras.Model:
    x = inputs = keras.Input((8,))
    for n, each in enumerate(widths):
        x = layers.Dense(each, "tanh", name=f"dense_{n}")(x)
    return keras.Model(inputs, x)


@LONG
def test_dense_layers_of_one_shape_are_cut_in_pairs():
    keras.utils.set_random_seed(1)
    batch = [RNG.normal(size=(4, 8)) for _ in range(2)]
    chosen = Chosen(stack(8, 8, 8, 8), batch, keras.losses.MeanSquaredError())
    assert [chosen.axes.get(f"dense_{n}/kernel") for n in range(4)] == [1, 0, 1, 0], chosen.axes
    chosen.check_on((1, 2))


@pytest.mark.parametrize(("widths", "rows", "size"), [((3, 5), 4, 7), ((8, 2), 20_000, 2)])
def test_small_weights_are_not_cut(widths, rows, size):
    keras.utils.set_random_seed(1)
    batch = [RNG.normal(size=(rows, 8)), RNG.normal(size=(rows, widths[-1]))]
    assert Chosen(stack(*widths), batch, keras.losses.MeanSquaredError(), size=size).axes == {}
