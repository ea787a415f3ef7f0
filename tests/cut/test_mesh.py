"""Steps cut along the model axis of a mesh, and then along the batch, equal one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cut.layouts import TRANSFORMER, Rules, transformer
from cut.mesh import Mesh, Position, mesh_of

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import MeshLayout
from keras_ddl.cut.commit import after_commit
from keras_ddl.errors import ConfigError

layers = keras.layers
RNG = np.random.default_rng(4)
X, Y = RNG.normal(size=(7, 5)), RNG.normal(size=(7, 3))

pytestmark = pytest.mark.usefixtures("float64")


def tokens(rows: int = 7, length: int = 5) -> list[np.ndarray]:
    return [RNG.integers(0, 16, (rows, length)).astype("int32") for _ in range(2)]


def transformer_on(shape: Position, rules: Rules = TRANSFORMER, **options: Any) -> Mesh:
    keras.utils.set_random_seed(5)
    optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return mesh_of(transformer(blocks=1), tokens(), shape, rules, optimizer=optimizer, loss=loss, **options)


@pytest.mark.long  # tests/strategy/mesh_checks.py has a transformer on ranks
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2), {"counts": [4, 3]}),
        ((2, 4), {"counts": [7, 0]}),
        ((3, 2), {"static": False}),
    ],
)
def test_a_transformer_on_a_mesh_equals_one_process(shape, options):
    mesh = transformer_on(shape, **options).check(*tokens(), steps=2)
    assert mesh.kinds() == ["sum"] * 5  # four of the block, and no gather of an activation; squares of gradients
    assert set(mesh.kinds("data")) == {"sum"}


VOCABULARY: Rules = {**TRANSFORMER, "table": 0, "head/kernel": 1, "head/bias": 0}


@pytest.mark.long
def test_a_vocabulary_is_cut_without_gathering_rows_or_logits():
    mesh = transformer_on((2, 2), VOCABULARY, counts=[4, 3], static=False).check(*tokens(), steps=2)
    assert "gather" not in mesh.kinds() and mesh.kinds().count("max") == 1, mesh.moved()
    assert not mesh.model_reports[0, 0].replicated


@pytest.mark.parametrize("number", [-1, 16])
@pytest.mark.parametrize("what", ["label", "row"])
def test_what_a_cut_table_does_not_have_is_an_error(what, number):
    weight, numbers = tf.Variable(RNG.normal(size=(16, 5))), np.array([3, number, 0], np.int32)

    def step(x: Any, numbers: Any) -> Any:
        if what == "row":
            return tf.nn.embedding_lookup(weight, numbers)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(numbers, tf.matmul(x, weight, transpose_b=True))

    with pytest.raises(tf.errors.InvalidArgumentError):
        Mesh(step, [X[:3], numbers], (1, 2), [weight], {id(weight): 0})(X[:3], numbers)


def dense() -> keras.Model:
    keras.utils.set_random_seed(1)
    up, down = layers.Dense(8, "tanh", name="up"), layers.Dense(3, name="down")
    return keras.Sequential([keras.Input((5,)), up, down])


PAIR: Rules = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}


def dense_on(optimizer: Any, shape: Position = (2, 2), rules: Rules = PAIR, **options: Any) -> Mesh:
    return mesh_of(dense(), [X, Y], shape, rules, optimizer=optimizer, **options)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "all": lambda: keras.optimizers.Adam(
        1e-2,
        amsgrad=True,
        global_clipnorm=0.1,
        weight_decay=0.1,
        use_ema=True,
        ema_overwrite_frequency=3,
        gradient_accumulation_steps=2,
    ),
    "momentum": lambda: keras.optimizers.SGD(1e-2, momentum=0.9),
    "averaged": lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.1, use_ema=True),
    "clipnorm": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True, clipnorm=0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),  # with slots of other shapes than their weight
    "muon": lambda: keras.optimizers.Muon(1e-2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-2), initial_scale=64.0, dynamic_growth_steps=2
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_weights_cut_along_the_model_axis_equal_one_process(name):
    dense_on(OPTIMIZERS[name]()).check(X, Y, steps=4)


def test_reports_name_the_lines_of_the_program_for_each_axis():
    mesh = dense_on(keras.optimizers.SGD(1e-2))
    mesh(X, Y)
    for report in (mesh.model_reports[0, 0], mesh.data_reports[0, 0]):
        assert report.entries and all(each.line.startswith("tests/cut/mesh.py:") for each in report.entries)


def test_slots_that_follow_their_weight_move_nothing():
    assert dense_on(keras.optimizers.Adam(1e-2), (1, 2)).moved()["model"] == [("sum", 1)]


@pytest.mark.long
def test_a_layout_of_kernels_alone_has_one_bucket_of_gradients_of_biases():
    rules = {name: axis for name, axis in PAIR.items() if "bias" not in name}
    mesh = dense_on(keras.optimizers.Adam(1e-2, clipnorm=0.1), (1, 2), rules, along_batch=False)
    mesh.check(X, Y)
    assert set(mesh.kinds()) == {"sum"}, mesh.moved()
    gradients = [entry for entry in mesh.model_reports[0, 0].entries if "up" in str(entry.values)]
    assert len(gradients) == 1, gradients  # once, for its norm, both moments and the weight


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.long)])
def test_rows_are_looked_up_in_a_variable_and_scattered_into_it(axis):
    table, other = tf.Variable(RNG.normal(size=(6, 4))), tf.Variable(RNG.normal(size=(6, 4)))
    x, places = RNG.normal(size=(7, 4)), RNG.integers(0, 6, (7,))

    def step(x: Any, places: Any) -> Any:
        rows = tf.nn.embedding_lookup(table, places)
        with tf.control_dependencies([rows]):
            table.scatter_sub(tf.IndexedSlices(0.1 * x, places))
            other.scatter_add(tf.IndexedSlices(rows[:, ::-1], places))
            other.scatter_update(tf.IndexedSlices(tf.ones([1, 4], tf.float64), tf.constant([3])))
        return tf.reduce_sum(rows * x, 1), tf.shape(other)

    layout = {id(table): axis, id(other): axis}
    Mesh(step, [x, places], (2, 2), [table, other], layout).check(x, places)


@pytest.mark.long
def test_halves_are_computed_as_in_one_process():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2), dynamic_growth_steps=2)
        dense_on(optimizer).check(X, Y, tolerance=3e-3)
    finally:
        keras.config.set_dtype_policy(policy)


@pytest.mark.long
def test_a_loop_gathers_what_it_reads_of_cut_weights():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3, 4)), layers.LSTM(4, name="lstm"), layers.Dense(2)])
    x, y = RNG.normal(size=(5, 3, 4)), RNG.normal(size=(5, 2))
    mesh = mesh_of(model, [x, y], (2, 2), {"lstm.*kernel": 1, "lstm.*bias": 0}).check(x, y)
    assert mesh.moved()["model"] == [("gather", 1)] * 3
    assert set(mesh.kinds("data")) == {"sum"}  # its rows are cut as ever


def test_parts_that_a_loop_adds_up_are_those_of_one_axis():
    weight = tf.Variable(RNG.normal(size=(4, 3)))

    def step(x: Any) -> Any:
        read, squares = weight.read_value(), tf.reduce_sum(tf.square(x[:, :4]), 0)
        start = tf.reduce_sum(tf.square(x[:, :3]), 0)  # a part of a sum over the batch
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, total: (i + 1, total * 0.5 + tf.tensordot(squares, read, 1)), (0, start)
        )[1]

    Mesh(step, [X], (2, 2), [weight], {id(weight): 0}).check(X)


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (
            lambda w, x: tf.while_loop(lambda i: i < 3, lambda i: (w.assign_add(w), i + 1)[1:], (0,)),
            "Leave the variable out of the layout",
        ),
        (lambda w, x: w.scatter_nd_add([[0]], x[:1]), "ResourceScatterNdAdd"),
    ],
    ids=["loop", "operation"],
)
def test_other_writes_of_a_cut_weight_are_refused(write, match):
    weight = tf.Variable(np.ones((4, 5)))
    with pytest.raises(ConfigError, match=match):
        Mesh(lambda x: (write(weight, x), tf.constant(0))[1], [X], (1, 2), [weight], {id(weight): 0})


def test_the_first_rank_of_the_mesh_alone_calls_host_functions(tmp_path):
    weight = tf.Variable(RNG.normal(size=(5, 4)))
    calls: list[float] = []

    def called(total: np.ndarray) -> np.ndarray:
        calls.append(float(total))
        return np.float64(total + len(calls))

    def step(x: Any) -> Any:
        total = tf.numpy_function(called, [tf.reduce_sum(x @ weight)], tf.float64)
        total.set_shape([])
        tf.print("total", total, output_stream=f"file://{tmp_path}/printed")
        weight.assign_add(total * tf.ones_like(weight))
        return total

    mesh = Mesh(step, [X], (2, 2), [weight], {id(weight): 1})
    results = mesh(X)
    assert len(calls) == 1 and len((tmp_path / "printed").read_text().splitlines()) == 1
    assert {float(outputs[0]) for outputs in results.values()} == {calls[0] + 1}


@pytest.mark.parametrize(
    ("name", "small"),
    [("momentum", None), *(pytest.param(each, 1, marks=pytest.mark.long) for each in ("momentum", "averaged"))],
)
def test_a_step_that_fails_is_written_on_no_rank(name, small, monkeypatch):
    """`small`: bytes from which on a value is made after the commit, unless it needs a collective."""
    if small is not None:
        monkeypatch.setattr(after_commit, "_SMALL", small)
    mesh = dense_on(OPTIMIZERS[name]()).check(X, Y, steps=small or 0)
    before = mesh.everything()
    mesh.everyone.breaks = "commit"
    with pytest.raises(tf.errors.OpError, match="a rank was lost"):
        mesh(X, Y)
    np.testing.assert_equal(mesh.everything(), before)


@pytest.mark.long
def test_new_values_are_made_after_the_commit_one_after_the_other(monkeypatch):
    monkeypatch.setattr(after_commit, "_SMALL", 1)
    mesh = dense_on(keras.optimizers.Adam(1e-2), (1, 2)).check(X, Y)
    numbers = [tf.constant(n, tf.int64) for n in (7, 0, 7)]
    graph = mesh.functions[0, 0].get_concrete_function(*numbers, X, Y).graph

    @functools.cache
    def writes_before(operation: Any) -> frozenset[str]:
        before = [*(each.op for each in operation.inputs), *operation.control_inputs]
        return frozenset(each.name for each in before if each.type == "AssignVariableOp").union(
            *map(writes_before, before)
        )

    writes = [writes_before(each) for each in graph.get_operations() if each.type == "AssignVariableOp"]
    assert sum(map(bool, writes)) >= 5, writes  # both kernels with their moments


@pytest.mark.parametrize(("rows", "expected"), [(4, True), (None, True), (4096, False)])
def test_a_gradient_waits_for_the_commit_if_its_operands_are_smaller(rows, expected):
    with tf.Graph().as_default():
        x, dy = (tf.tanh(tf.compat.v1.placeholder(tf.float32, [rows, 256])) for _ in range(2))
        gradient = tf.matmul(x, dy, transpose_a=True)
        value = gradient * 0.1
        after = after_commit.AfterCommit([value], [x, dy])
        assert (gradient in after) is expected and value in after
        assert gradient not in after_commit.AfterCommit([value], [gradient])
        assert value not in after_commit.AfterCommit([value], [value])


@pytest.mark.parametrize(("shape", "axis"), [((6, 8), 0), ((6, 8), 1), ((4, 6, 5), 1), ((12,), 0)])
@pytest.mark.parametrize(("data", "model"), [(2, 2), (3, 2), (5, 1)])
def test_a_variable_is_shared_out_among_all_ranks_of_a_mesh(shape, axis, data, model):
    values = np.arange(np.prod(shape)).reshape(shape)
    layout = MeshLayout(shape, axis, data, model)
    seen = []
    for rank in range(layout.size):
        mine = layout.cut(values, rank)
        box_tensors = [values[tuple(slice(first, first + n) for first, n in box)].ravel() for box in layout.boxes(rank)]
        assert mine.shape == layout.shape_of(rank) == (layout.chunk(rank)[1],)
        np.testing.assert_array_equal(np.concatenate([[], *box_tensors]), mine)
        seen.append(mine)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), values.ravel())
