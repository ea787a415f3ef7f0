"""Reading a keras.distribution.LayoutMap, and what of it is refused; no ranks."""

import math

import keras
import pytest

import keras_ddl
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.mesh.layout import Layout


def layout_map(shape=(2, 2), names=("batch", "model"), **layouts):
    """Returns a LayoutMap; `layouts`: by pattern."""
    devices = [f"rank:{each}" for each in range(math.prod(shape))]
    result = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, names, devices=devices))
    for pattern, axes in layouts.items():
        result[pattern] = axes
    return result


def test_a_layout_names_the_axis_that_is_cut_as_keras_looks_it_up():
    kernels = layout_map(**{"dense/kernel": (None, "model"), ".*other/bias": ("model",)})
    layout = Layout(kernels, 4, 0)
    assert layout.axis_of("dense/kernel", (3, 4)) == 1
    assert layout.axis_of("model/other/bias", (4,)) == 0
    assert layout.axis_of("embedding", (3,)) is None


@pytest.mark.parametrize(
    ("layouts", "path", "shape", "message"),
    [
        ({".*kernel": (None, "model"), "dense.*": (None, "model")}, "dense/kernel", (3, 4), "one key at most"),
        ({".*": ("model",)}, "dense/kernel", (3, 4), "for each axis of the variable"),
        ({".*": ("model", None)}, "dense/kernel", (3, 4), "3 is not divided"),
        ({".*": ("model",)}, "dense/bias", (0,), "0 is not divided"),
    ],
)
def test_a_layout_that_does_not_fit_a_variable_is_refused(layouts, path, shape, message):
    with pytest.raises(ConfigError, match=message):
        Layout(layout_map(**layouts), 4, 0).axis_of(path, shape)


def test_a_layout_along_the_batch_axis_cuts_along_the_other_only():
    layout = Layout(layout_map(**{".*kernel": ("model", "batch"), ".*bias": ("batch",)}), 4, 0)
    assert layout.axis_of("kernel", (4, 3)) == 0 and layout.axis_of("bias", (4,)) is None
    assert layout.along_batch() == [".*kernel", ".*bias"]


def test_a_model_axis_of_one_rank_cuts_nothing():
    assert Layout(layout_map((4, 1), **{".*": (None, "model")}), 4, 0).axis_of("kernel", (3, 5)) is None
    assert Layout(layout_map((4,), ("batch",), **{".*": ("batch",)}), 4, 0).axis_of("bias", (3,)) is None


@pytest.mark.parametrize(
    ("mesh", "size", "message"),
    [
        (layout_map(), 3, r"as many devices as there are ranks \(3\)"),
        (keras.distribution.LayoutMap(None), 1, "needs a DeviceMesh"),
        (layout_map((2, 2, 2), ("batch", "model", "more")), 8, "a mesh has two axes"),
    ],
)
def test_a_mesh_of_another_job_is_refused(mesh, size, message):
    with pytest.raises(ConfigError, match=message):
        Layout(mesh, size, 0)


def test_keys_without_effect_are_told(recwarn):
    layout = Layout(layout_map(**{".*kernel": (None, "model"), "nothing": ("model",)}), 4, 0)
    with pytest.raises(ConfigError, match="match none"):
        layout.check_effects()
    layout.axis_of("dense/kernel", (3, 4))
    for _ in range(2):
        layout.check_effects()
    assert [str(each.message) for each in recwarn] == [
        "layout_map: these keys match no variable, and have no effect: ['nothing']."
    ]


def test_a_mesh_that_is_not_of_the_ranks_is_refused():
    with pytest.raises(ConfigError, match="product of the extents"):
        keras_ddl.device_mesh((2, 2))
    with pytest.raises(ConfigError, match="with 1 ranks"):
        keras_ddl.device_mesh((1,), ("batch", "model"))
    mesh = keras_ddl.device_mesh((1, 1))
    assert isinstance(mesh, keras.distribution.DeviceMesh) and mesh.axis_names == ("batch", "model")


@pytest.mark.parametrize("other", [{"compression": "float16"}, {"shard_optimizer": True}, {"batch_statistics": "rank"}])
def test_settings_that_do_not_go_together_with_a_layout_are_refused(other):
    layout = keras.distribution.LayoutMap(keras_ddl.device_mesh((1, 1)))
    with pytest.raises(ConfigError, match=f"with a layout_map, {next(iter(other))} must be"):
        keras_ddl.Strategy(layout_map=layout, **other)
    with pytest.raises(ConfigError, match=r"layout_map must be a keras\.distribution\.LayoutMap"):
        keras_ddl.Strategy(layout_map={".*": ("model",)})
