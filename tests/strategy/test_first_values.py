"""Each rank draws its share of an initial value bit for bit as one process would; needs no ranks."""

import keras
import numpy as np
import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Slices
from keras_ddl.cut.values.layouts import Layout
from keras_ddl.strategy.variables import first_values
from keras_ddl.strategy.variables.first_values import FirstValue, recipe_of

of = keras.initializers
INITIALIZERS = {
    "glorot_uniform": lambda: of.GlorotUniform(3),
    "glorot_normal": lambda: of.GlorotNormal(),  # takes its seed from Python's generator
    "he_normal": lambda: of.HeNormal(keras.random.SeedGenerator(4)),
    "he_uniform": lambda: of.HeUniform(5),
    "lecun_normal": lambda: of.LecunNormal(6),
    "lecun_uniform": lambda: of.LecunUniform(7),
    "scaling": lambda: of.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=8),
    "normal": lambda: of.RandomNormal(0.1, 0.3, seed=keras.random.SeedGenerator(9)),
    "uniform": lambda: of.RandomUniform(-1, 2, seed=10),
    "truncated_normal": lambda: of.TruncatedNormal(seed=11),
    "zeros": lambda: of.Zeros(),
    "ones": lambda: of.Ones(),
    "constant": lambda: of.Constant(0.3),
}
SHAPES = [(12, 8), (4, 6, 10), (36,), (3, 3, 4, 20), (2, 2), (130, 2)]


def made(name, shape, dtype):
    """Returns an initial value drawn by one process, and the object that makes shares of it."""
    keras.utils.set_random_seed(1)
    one = np.asarray(INITIALIZERS[name]()(shape, dtype=dtype))
    keras.utils.set_random_seed(1)
    return one, FirstValue(recipe_of(INITIALIZERS[name]()), shape, dtype)


QUICK = (("glorot_uniform", "float32"), ("constant", "float32"), ("normal", "bfloat16"))
FURTHER = [(each, "float32") for each in INITIALIZERS] + [("normal", "float64"), ("normal", "float16")]


@pytest.mark.parametrize(
    ("name", "dtype"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.long) for each in FURTHER if each not in QUICK)]
)
def test_shares_of_a_first_value_equal_one_process(name, dtype, monkeypatch):
    monkeypatch.setattr(first_values, "_BLOCK", 64)  # several blocks, which start inside groups of numbers
    for shape in SHAPES:
        one, value = made(name, shape, dtype)
        slices = [Slices(shape, ranks, axis) for axis, n in enumerate(shape) for ranks in (2, 3, 4) if n % ranks == 0]
        assert value.is_possible and slices
        for each in [*slices, Layout(shape, 3)]:
            for rank in range(each.size):
                expected = each.cut(one, rank)
                np.testing.assert_array_equal(value.share(each.runs(rank), expected.shape).numpy(), expected)


def test_drawing_a_share_takes_memory_for_a_share(monkeypatch):
    drawn = []
    draw = FirstValue._draw
    monkeypatch.setattr(FirstValue, "_draw", lambda self, op, first, n: drawn.append(n) or draw(self, op, first, n))
    monkeypatch.setattr(first_values, "_BLOCK", 1000)
    for axis, most in ((0, 20 * 50), (1, 1000)):  # draws only the rank's rows; draws all rows block by block
        slices = Slices((100, 50), 5, axis)
        FirstValue(recipe_of(of.GlorotUniform(3)), (100, 50), "float32").share(slices.runs(2), slices.shape_of_slice)
        assert max(drawn) <= most and sum(drawn) == (1000 if axis == 0 else 5000)
        drawn.clear()


@pytest.mark.parametrize("name", ["normal", "truncated_normal", "zeros"])
def test_a_variable_is_given_a_share_in_its_memory(name, monkeypatch):
    monkeypatch.setattr(first_values, "_BLOCK", 100)
    one, value = made(name, (130, 6), "float32")
    layout = Layout((130, 6), 3)
    for rank in range(3):
        variable = tf.Variable(tf.zeros(layout.shape_of(rank)))
        value.put(variable, layout.runs(rank))
        np.testing.assert_array_equal(variable.numpy(), layout.cut(one, rank))


def test_recipe_advances_generators_as_one_process_would():
    generator = keras.random.SeedGenerator(4)
    recipe_of(of.RandomNormal(seed=generator))
    assert generator.state.numpy().tolist() == [4, 1]
    seeds = []
    for value in (False, True):
        keras.utils.set_random_seed(2)
        initializer = of.GlorotUniform()
        if value:
            FirstValue(recipe_of(initializer), (4,), "float32")
        seeds.append(of.GlorotUniform().seed)
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(
    "initializer", [of.Orthogonal(1), of.Identity(), of.Constant(np.ones(4)), lambda shape, dtype: np.ones(shape)]
)
def test_other_initializers_have_no_recipe(initializer):
    assert recipe_of(initializer) is None


@pytest.mark.parametrize("initializer", [of.Zeros(), of.GlorotUniform(1)])
def test_share_of_a_rank_may_be_empty(initializer):
    layout = Layout((2,), 3)
    value = FirstValue(recipe_of(initializer), (2,), "float32")
    assert [value.share(layout.runs(rank), [layout.chunk(rank)[1]]).shape for rank in range(3)] == [1, 1, 0]
