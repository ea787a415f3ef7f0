"""Reading a keras.distribution.LayoutMap and rejecting invalid ones; needs no ranks."""

import math
from types import SimpleNamespace

import keras
import pytest

import keras_ddl
from keras_ddl import errors
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import REPLICATED, Sharded
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.mesh import layout_of
from keras_ddl.strategy.mesh.layout import DataLayout, VariableLayout
from keras_ddl.strategy.shards.layout_choice import written


def layout_map(shape=(2, 2), names=("batch", "model"), **layouts):
    """Returns a LayoutMap with the given layouts, keyed by pattern."""
    devices = [f"rank:{each}" for each in range(math.prod(shape))]
    result = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, names, devices=devices))
    for pattern, axes in layouts.items():
        result[pattern] = axes
    return result


def test_layout_finds_the_cut_axis_as_keras_would():
    kernels = layout_map(**{"dense/kernel": (None, "model"), ".*other/bias": ("model",)})
    layout = VariableLayout(kernels, 4, 0)
    assert layout.axis_of("dense/kernel", (3, 4)) == 1
    assert layout.axis_of("model/other/bias", (4,)) == 0
    assert layout.axis_of("embedding", (3,)) is None


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({".*kernel": (None, "model"), "dense.*": (None, "model")}, "at most one key"),
        ({".*": ("model",)}, "for each axis of the variable"),
        ({".*": ("model", None)}, "with extent 3"),
    ],
)
def test_layout_that_does_not_fit_a_variable_is_refused(layouts, message):
    with pytest.raises(ConfigError, match=message):
        VariableLayout(layout_map(**layouts), 4, 0).axis_of("dense/kernel", (3, 4))


def test_batch_axis_and_model_axis_of_one_rank_cut_nothing():
    layout = VariableLayout(layout_map(**{".*kernel": ("model", "batch"), ".*bias": ("batch",)}), 4, 0)
    assert layout.axis_of("kernel", (4, 3)) == 0 and layout.axis_of("bias", (4,)) is None
    assert layout.along_batch() == [".*kernel", ".*bias"]
    assert VariableLayout(layout_map((4, 1), **{".*": (None, "model")}), 4, 0).axis_of("kernel", (3, 5)) is None
    assert VariableLayout(layout_map((4,), ("batch",), **{".*": ("batch",)}), 4, 0).axis_of("bias", (3,)) is None


def with_devices(*devices):
    return keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices=devices))


@pytest.mark.parametrize(
    ("mesh", "size", "message"),
    [
        (layout_map(), 3, r"as many devices as there are ranks \(3\)"),
        (keras.distribution.LayoutMap(None), 1, "needs a DeviceMesh"),
        (layout_map((2, 2, 2), ("batch", "model", "more")), 8, "a mesh has two axes"),
        (with_devices("gpu:0", "gpu:1", "gpu:2", "gpu:3"), 4, r"in their order, rank:0.*Received: devices="),
        (with_devices("rank:0", "rank:1", "rank:3", "rank:2"), 4, r"in their order, rank:0.*Received: devices="),
    ],
)
def test_mesh_whose_devices_are_not_the_ranks_is_refused(mesh, size, message):
    with pytest.raises(ConfigError, match=message):
        VariableLayout(mesh, size, 0)


def test_unknown_mesh_axes_are_refused():
    mapped = layout_map()
    elsewhere = keras.distribution.DeviceMesh((1,), ("columns",), devices=["rank:0"])
    mapped[".*kernel"] = keras.distribution.TensorLayout((None, "columns"), elsewhere)
    with pytest.raises(ConfigError, match=r"'batch', 'model', or None.*unknown axes \['columns'\]"):
        VariableLayout(mapped, 4, 0)


def test_mesh_with_swapped_axes_is_refused():
    exchanged = layout_map((2, 2), ("model", "batch"), **{".*kernel": (None, "model")})
    with pytest.raises(ConfigError, match="swap the axes of the mesh"):
        VariableLayout(exchanged, 4, 0)
    VariableLayout(layout_map((4, 1), **{".*kernel": (None, "batch")}), 4, 0)  # nothing to cut


def test_unused_layout_keys_are_reported(recwarn):
    layout = VariableLayout(layout_map(**{".*kernel": (None, "model"), "nothing": ("model",)}), 4, 0)
    layout.axis_of("sequential/dense/bias", (4,))
    with pytest.raises(ConfigError, match=r"match no path of sequential/dense/bias .*begin the keys with '\.\*'"):
        layout.check_effects()
    layout.axis_of("dense/kernel", (3, 4))
    for _ in range(2):
        layout.check_effects()
    assert [str(each.message) for each in recwarn] == [
        "layout: these keys match no variable, and have no effect: ['nothing']."
    ]


def test_mesh_of_the_wrong_size_is_refused():
    with pytest.raises(ConfigError, match="product of the extents"):
        keras_ddl.device_mesh((2, 2))
    with pytest.raises(ConfigError, match="with 1 ranks"):
        keras_ddl.device_mesh((1,), ("batch", "model"))
    mesh = keras_ddl.device_mesh((1, 1))
    assert isinstance(mesh, keras.distribution.DeviceMesh) and mesh.axis_names == ("batch", "model")


@pytest.mark.parametrize("other", [{"compression": "float16"}, {"batch_statistics": "rank"}])
def test_settings_incompatible_with_a_layout_are_refused(other):
    layout = keras.distribution.LayoutMap(keras_ddl.device_mesh((1, 1)))
    with pytest.raises(ConfigError, match=f"with a LayoutMap, {next(iter(other))} must be"):
        keras_ddl.Strategy(layout=layout, **other)
    with pytest.raises(ConfigError, match=r"layout must be a keras\.distribution\.LayoutMap"):
        keras_ddl.Strategy(layout={".*": ("model",)})


def test_data_layout_names_both_axes_of_the_mesh():
    mesh_of_batch = layout_map((2, 2))
    assert VariableLayout(mesh_of_batch, 4, 0, data_layout=("batch", None, "model")).data.axis == 2
    for wrong in [("model", "batch"), ("batch", "other"), ("batch", "model", "model")]:
        with pytest.raises(ConfigError, match="data_layout must begin with .* 'batch'"):
            VariableLayout(mesh_of_batch, 4, 0, data_layout=wrong)
    with pytest.raises(ConfigError, match="data_layout names axes of a device mesh"):
        keras_ddl.Strategy(data_layout=("batch", "model"))
    layout = DataLayout(("batch", "model"), "batch", "model", 0)
    values = [tf.TensorSpec(shape) for shape in ([None, 8, 3], [4, 7], [4, None], [4], [8, 8])]
    rows = [Sharded(0)] * 4 + [REPLICATED]
    assert layout.axes_of_arguments(values, rows, 2, "step") == [1, None, None, None, None]
    with pytest.warns(UserWarning, match=r"step, where no argument qualifies: shapes \(4, 7\)"):
        layout.axes_of_arguments(values[1:2], rows, 2, "step")


def test_invalid_number_of_model_ranks_is_refused():
    for other in ({"compression": "float16"}, {"sharding": "optimizer"}):
        with pytest.raises(ConfigError, match="with a number of model ranks, .* must be None"):
            keras_ddl.Strategy(layout=2, **other)
    for wrong in (0, 2.0, True):
        with pytest.raises(ConfigError, match="or a number of model ranks, 1 or more"):
            keras_ddl.Strategy(layout=wrong)
    topology = SimpleNamespace(size=6, rank=3)
    with pytest.raises(ConfigError, match=r"divide the number of ranks \(6\)\. Received: layout=4 \(rank 3\)"):
        layout_of(4, None, topology)
    assert layout_of(2, None, SimpleNamespace(size=1, rank=0)) is None  # one rank trains alone


def test_chosen_layout_is_written_as_few_equivalent_keys():
    block_axes = {
        "attention/query/kernel": (None, "model", None),
        "attention/key/kernel": (None, "model", None),
        "attention/output/kernel": ("model", None, None),
        "up/kernel": (None, "model"),
        "norm/gamma": None,
    }
    axes = {f"block_{n}/{path}": each for n in range(12) for path, each in block_axes.items()}
    axes |= {
        "dense/kernel": (None, "model"),
        "dense_1/kernel": ("model", None),
        "dense_2/kernel": None,
        "table.x/t": ("model", None),
    }
    pair = {1: (None, "model"), 2: ("model", None), 3: None}
    axes |= {f"conv{stage}_block{n}_{k}_conv/w": each for stage in (2, 3) for n in (1, 2) for k, each in pair.items()}
    keys = written(list(axes), {path: each for path, each in axes.items() if each is not None})
    assert set(keys) == {
        r"block_\d+/attention/(query|key)/kernel", r"block_\d+/attention/output/kernel", r"block_\d+/up/kernel",
        "dense/kernel", "dense_1/kernel", r"table\.x/t", r"conv\d+_block\d+_1_conv/w", r"conv\d+_block\d+_2_conv/w",
    }  # fmt: skip
    layout = layout_map((2, 2), **keys)
    assert {path: None if (found := layout[path]) is None else found.axes for path in axes} == axes


@pytest.mark.parametrize(
    ("communicator", "fields", "lost", "said"),
    [
        (0, {"lost": (3,)}, (3,), "x (On the mesh: rank 3 (batch 1, model 1).)"),
        (11, {"lost": (0,)}, (2,), "x (On the mesh: rank 2 (batch 1, model 0).)"),
        (12, {"lost": (0, 1)}, (1, 3), "x (On the mesh: rank 1 (batch 0, model 1), rank 3 (batch 1, model 1).)"),
        (12, {"named": (0,)}, (), "x (On the mesh: rank 1 (batch 0, model 1).)"),
        (0, {}, (), "x"),
    ],
)
def test_errors_name_positions_on_the_mesh(communicator, fields, lost, said, monkeypatch):
    """Rank 3 of a 2 x 2 mesh reports the error; each axis numbers its own ranks."""
    layout = VariableLayout(layout_map(**{".*": (None, "model")}), 4, 3)
    monkeypatch.setattr(errors, "_position_of", None)
    monkeypatch.setattr(errors, "_ranks_of", {11: (2, 3), 12: (1, 3)})
    errors.name_positions(layout.position)
    error = errors.from_code(10, "x", communicator=communicator, **fields)
    assert (error.ranks, str(error)) == (lost, said)
    assert errors.name_of_rank(2) == "rank 2 (batch 1, model 0)"


def test_smaller_mesh_replicates_axes_it_does_not_divide(recwarn):
    layout = VariableLayout(layout_map(**{".*": (None, "model")}), 4, 0).resized(1, 3, 0)
    assert layout.axis_of("dense/kernel", (2, 6)) == 1
    assert layout.axis_of("dense/kernel", (2, 4)) is None
    assert "every rank keeps all of 'dense/kernel'" in str(recwarn.pop().message)
