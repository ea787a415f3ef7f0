"""Names by which ranks match collectives are equal on all ranks and differ within one graph."""

import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.ops import names


def traced(function, *args) -> list[str]:
    """Returns the names that `function` resolves while tf.function traces it."""
    names: list[str] = []
    tf.function(lambda *inputs: function(names.append, *inputs), autograph=False).get_concrete_function(*args)
    return names


def test_names_in_backward_functions_do_not_depend_on_earlier_graphs():
    found: list[str] = []

    @tf.custom_gradient
    def passed_on(x):
        def gradient(dy):
            found.append(names.resolve(None, "all_reduce"))
            return dy

        return tf.identity(x), gradient

    for _ in range(2):
        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.function(passed_on, autograph=False)(x)
        tape.gradient(y, x)
    assert found[-1] == found[0] and found[0].startswith("__"), found


def test_eager_names_form_one_queue_in_program_order():
    assert names.resolve(None, "all_reduce") == names.resolve(None, "broadcast") == names.EAGER
    assert [names.resolve("loss", "all_reduce") for _ in range(2)] == ["loss", "loss"]


def test_graph_names_are_unique_in_a_graph_and_equal_after_retracing():
    def step(found, x):
        for name in (None, None, "loss", "loss", "loss_1"):
            found(names.resolve(name, "all_reduce"))
        return x

    first = traced(step, tf.constant(1.0))
    assert len(set(first)) == 5
    assert "loss" in first
    tf.function(lambda x: tf.cond(x > 0, lambda: x, lambda: -x)).get_concrete_function(tf.constant(1.0))
    assert traced(step, tf.constant([1, 2])) == first


def test_branches_and_bodies_are_numbered_within_the_function():
    def step(found, x):
        def leaf(y):
            found(names.resolve(None, "all_reduce"))
            return y

        for _ in range(2):
            x = tf.cond(x > 0, lambda y=x: leaf(y), lambda y=x: leaf(-y))
            x = tf.while_loop(lambda y: y < 3, lambda y: [leaf(y) + 1], [x])[0]
        return x

    first = traced(step, tf.constant(1))
    assert len(set(first)) == 6, first
    for _ in range(3):  # shifts names that TensorFlow numbers per process
        tf.function(lambda x: tf.cond(x > 0, lambda: x, lambda: -x)).get_concrete_function(tf.constant(1))
    assert traced(step, tf.constant(1)) == first


def test_given_names_differ_between_conditionals_but_not_between_branches():
    def step(found, x):
        def leaf(y):
            found(names.resolve("loss", "all_reduce"))
            return y

        for _ in range(2):
            x = tf.cond(x > 0, lambda y=x: leaf(leaf(y)), lambda y=x: leaf(-y))
        x = tf.while_loop(lambda y: y < 3, lambda y: [leaf(y) + 1], [x])[0]
        return leaf(tf.switch_case(x, [lambda: leaf(x), lambda: leaf(-x)]))

    one_cond = ["loss", "loss_1", "loss"]
    assert traced(step, tf.constant(1)) == [
        *one_cond, *["loss_2", "loss_3", "loss_2"], "loss_4", "loss_5", "loss_5", "loss_6",
    ]  # fmt: skip


def test_names_in_nested_functions_do_not_depend_on_the_caller():
    def inner(found, x):
        found(names.resolve(None, "all_reduce"))
        return x

    direct = traced(inner, tf.constant(1.0))

    def outer(found, x):
        return tf.function(lambda y: inner(found, y), autograph=False)(x)

    assert traced(outer, tf.constant(1.0)) == direct


def test_names_are_counted_per_communicator():
    def step(found, x, with_others):
        found(names.resolve(None, "all_reduce"))
        if with_others:
            others.append([names.resolve(None, "all_reduce", "row/", number) for number in (5, 5, 6)])
        found(names.resolve(None, "all_reduce"))
        return x

    others: list[list[str]] = []
    for_some = traced(lambda found, x: step(found, x, True), tf.constant(1.0))
    assert [name.rpartition("/")[2] for name in for_some] == ["all_reduce", "all_reduce_1"]
    first, second, other = others[0]
    assert first == other != second, "each communicator has its first"
    assert all(name.startswith("row/") for name in others[0])


def test_derived_names_stay_within_the_cores_limit():
    assert names.derived("loss", "grad") == "loss/grad"
    assert names.derived(names.EAGER, "grad") == names.EAGER
    long = ["x" * 899 + end for end in "ab"]
    derived = {names.derived(names.derived(name, "grad"), "grad") for name in long}
    assert len(derived) == 2
    assert max(map(len, derived)) <= 900


@pytest.mark.parametrize("name", ["", "x" * 901, "\N{GREEK SMALL LETTER LAMDA}" * 451, 7])
def test_names_must_be_short_strings(name):
    with pytest.raises(ConfigError, match="name must be a string of 1 to 900 bytes"):
        names.resolve(name, "all_reduce")
