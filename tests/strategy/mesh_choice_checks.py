"""`Strategy(layout=2)`, which chooses a layout, on 2 x 2 ranks, compared with one process. Run by test_mesh.py."""

import contextlib
import io
import os
import re
from typing import Any
from unittest import mock

import keras
import numpy as np

import keras_ddl
from keras_ddl import checkpoint as ckpt
from keras_ddl.strategy.mesh.layout import VariableLayout
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.shards.laid_out import LaidOutVariable
from strategy.common import RANK, SIZE, X, Y, assert_close, of_one_process, recorded_warnings, shared_folder
from strategy.mesh_models import alone, assert_equal, compiled, fit_both

with mock.patch.dict(os.environ, KERAS_DDL_DRIFT_CHECK_PERCENT="100"):
    CHOOSES = keras_ddl.Strategy(layout=2)


def shown_layout(output: str) -> keras.distribution.LayoutMap:
    """Returns the layout made by running the lines that rank 0 printed."""
    lines = [
        each
        for each in keras_ddl.broadcast_object(output, name="test/shown").splitlines()
        if re.match(r"(mesh|layout_map)\b", each)
    ]
    names: dict[str, Any] = {"keras": keras, "keras_ddl": keras_ddl}
    exec("\n".join(lines), names)
    return names["layout_map"]


def cut_axes(model: keras.Model) -> dict[str, int]:
    cut = [each for each in model.variables if isinstance(each.value, LaidOutVariable) and not each.value.is_complete]
    return {each.path: each.value.axis for each in cut}


def numbered() -> keras.Model:
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(8, activation="tanh")(inputs)))


def shift_numbers() -> None:
    """Shifts layer numbers by rank, as on ranks that made different models before."""
    for _ in range(RANK):
        keras.layers.Dense(1)


def check_chosen_layout_uses_rank_0_names():
    shift_numbers()
    model, one = compiled(CHOOSES, numbered), alone(numbered)
    fit_both(model, one, X, Y, batch_size=10, verbose=0)
    assert_equal(model, one)
    assert sorted(cut_axes(model).values()) == [0, 0, 1]


def check_keys_are_paths_on_rank_0():
    number = int(keras.layers.Dense(1).name.rpartition("_")[2])
    first, second = (keras_ddl.broadcast_object(f"dense_{number + each}", name=f"test/name{each}") for each in (1, 2))
    layout = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
    layout[f"{first}/kernel"], layout[f"{second}/kernel"] = (None, "model"), ("model", None)
    shift_numbers()
    model, one = compiled(keras_ddl.Strategy(layout=layout), numbered), alone(numbered)
    fit_both(model, one, X, Y, batch_size=10, verbose=0)
    assert_equal(model, one)
    assert list(cut_axes(model).values()) == [0, 1]  # the two-unit layer was made first


def check_chosen_layout_equals_one_process_and_prints_runnable_code():
    model, one, shown = compiled(CHOOSES), alone(), io.StringIO()
    with CHOOSES.whole_model(model):  # every rank holds all weights until a layout is chosen
        before = model.get_weights()
    weights, answers = of_one_process(lambda: (one.get_weights(), np.asarray(one(X[:3]))))
    assert_close(before, weights, 0)
    np.testing.assert_allclose(model(X[:3]), answers, rtol=0, atol=1e-12)
    model.set_weights(before)
    with contextlib.redirect_stdout(shown):
        fit_both(model, one, X, Y, batch_size=10, epochs=2, verbose=0)
    assert_equal(model, one)
    expected = of_one_process(lambda: one.evaluate(X, Y, batch_size=10, verbose=0))
    np.testing.assert_allclose(model.evaluate(X, Y, batch_size=10, verbose=0), expected, atol=1e-12)
    axes = cut_axes(model)
    assert axes == {"dense_wide/kernel": 1, "dense_wide/bias": 0, "dense_narrow/kernel": 0}, axes
    assert (
        sum(not each.is_complete for each in gathered_slots.slots_of(model)) == 3 * 3
    )  # three weights, two slots each
    layout = VariableLayout(shown_layout(shown.getvalue()), SIZE, RANK)
    assert {each.path: layout.axis_of(each.path, each.shape) for each in model.weights} == {
        each.path: axes.get(each.path) for each in model.weights
    }


def check_model_with_nothing_to_cut_trains_replicated_with_a_warning():
    # The layers have names because a layout refers to names, and rank 0 has made more layers than the others.
    layers = lambda: [keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="last")]  # noqa: E731
    make = lambda: keras.Sequential([keras.Input((5,)), *layers()], name="small")  # noqa: E731
    model, one = compiled(CHOOSES, lambda: make()), alone(make)
    x, y = X[:, :5], Y[:, :1]
    with recorded_warnings("is worth cutting") as messages:
        fit_both(model, one, x, y, batch_size=10, verbose=0)
    assert len(messages) == (RANK == 0)
    assert_equal(model, one)


class TwoHeads(keras.Model):
    """A model with two heads, of which training uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.layers.Dense(8, activation="tanh", name="body")
        self.heads = [keras.layers.Dense(2, name=name) for name in ("used", "unused")]

    def build(self, shape: Any) -> None:
        self.body.build(shape)
        for each in self.heads:
            each.build((None, 8))

    def call(self, x: Any) -> Any:
        return self.heads[0](self.body(x))


def check_slots_of_unused_weights_are_saved():
    def make() -> keras.Model:
        model = TwoHeads()
        model.build((None, 6))
        return model

    model, one = compiled(CHOOSES, make), compiled(None, make)
    with shared_folder() as folder:
        save = keras_ddl.callbacks.Checkpoint(folder, export_base=False, save_best=False)
        model.fit(X, Y, batch_size=10, verbose=0, callbacks=[save])
        saved = ckpt.latest(folder)
        assert saved.state is not None and len(saved.state["optimizer"]) == len(model.optimizer.variables)
    one.fit(X, Y, batch_size=10, verbose=0)
    assert_equal(model, one)
