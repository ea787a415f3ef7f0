"""Sharded variables, such as an optimizer's slots under sharding="optimizer"."""

import keras
import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.values.layouts import Layout
from keras_ddl.errors import ConfigError

RNG = np.random.default_rng(4)
X = RNG.normal(size=(7, 5))


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (1, 8), (3,), (2, 1, 3), (4, 0)])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_layout_gives_each_entry_to_one_rank(shape, size):
    layout = Layout(shape, size)
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    chunks = [layout.cut(whole, rank) for rank in range(size)]
    np.testing.assert_array_equal(np.concatenate(chunks), whole.reshape(-1))
    counts = [len(each) for each in chunks]
    assert max(counts) - min(counts) in (0, layout.unit) and counts == sorted(counts, reverse=True)
    if whole.size and np.prod(shape[:-1], dtype=int) >= size:  # each row of the last axis lies on one rank
        assert all(count % (shape[-1] if len(shape) > 1 else 1) == 0 for count in counts)


class Trained:
    """A small network with a Keras optimizer whose slots for matrices are sharded."""

    def __init__(self, optimizer, *, size=3, wrap=lambda optimizer: optimizer, mirrors=0):
        keras.utils.set_random_seed(2)
        shapes = [(5, 7), (7,), (7, 3)]
        self.weights = [keras.Variable(RNG.normal(size=shape), dtype="float64") for shape in shapes]
        inner = optimizer
        self.optimizer = optimizer = wrap(optimizer)
        optimizer.build(self.weights)
        accumulated = getattr(inner, "_accumulated_gradients", None) or []
        slots = [v for v in inner.variables if np.prod(v.shape) >= 4 and all(v is not a for a in accumulated)]

        def step(x):
            with tf.GradientTape() as tape:
                hidden = tf.tanh(x @ self.weights[0] + self.weights[1])
                loss = tf.reduce_mean(tf.square(hidden @ self.weights[2]))
                scaled = optimizer.scale_loss(loss)
            trained = [each.value for each in self.weights]
            gradients = tape.gradient(scaled, trained)
            optimizer.apply(gradients, self.weights)
            return loss

        every = [*optimizer.variables, *self.weights]
        product = getattr(inner, "_u_product", None)
        variables = [each.value for each in every] + ([] if product is None else [product.value])
        self.sharded = [each.value for each in slots]
        self.simulation = Simulation(
            step,
            [X],
            size,
            variables=variables,
            sharded=self.sharded,
            mirrors=mirrors,
            parts=[each.value.handle for each in accumulated],
        )

    def train(self, steps=4):
        for number in range(steps):
            self.simulation.check(X * (1 + number))
        return self.simulation.reports[0]


def moves_of(report):
    return [(each.kind, len(each.values)) for each in report.entries]


OPTIMIZERS = {
    "nesterov": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-2, l1_regularization_strength=1e-3, beta=0.1),
    "lion": lambda: keras.optimizers.Lion(1e-2),
}


@pytest.mark.parametrize(
    "name", [each if each == "nesterov" else pytest.param(each, marks=pytest.mark.long) for each in OPTIMIZERS]
)
def test_sharded_optimizers_equal_one_process(name):
    moves = moves_of(Trained(OPTIMIZERS[name]()).train())
    assert [kind for kind, _ in moves] == ["sum", "reduce_scatter", "all_gather"], moves
    assert moves[1] == ("reduce_scatter", 3) and moves[2] == ("all_gather", 3)


OPTIONS = {
    "average": {"clipvalue": 0.01, "use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    "all": {
        "gradient_accumulation_steps": 2,
        "global_clipnorm": 0.1,
        "weight_decay": 0.1,
        "use_ema": True,
        "ema_overwrite_frequency": 3,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_sharded_optimizers_equal_one_process(name):
    moves = moves_of(Trained(keras.optimizers.Adam(1e-2, **OPTIONS[name])).train())
    kinds = [kind for kind, _ in moves]
    assert kinds.count("reduce_scatter") == 1 and kinds.count("all_gather") <= 2 and "gather" not in kinds, moves


@pytest.mark.long
def test_loss_scaling_with_shards_equals_one_process():
    wrap = lambda inner: keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=2)  # noqa: E731
    Trained(keras.optimizers.Adam(1e-2, global_clipnorm=0.1, gradient_accumulation_steps=2), wrap=wrap).train()


@pytest.mark.parametrize("entries", [60, 2**17])  # the larger one exceeds the largest float16, 65504
def test_mean_of_sharded_float16_equals_one_process(entries):
    slot = tf.Variable(np.full((entries // 4, 4), 2.0, np.float16))

    def step(x):
        return tf.reduce_mean(slot) + tf.cast(tf.reduce_sum(0.0 * x), tf.float16)

    for outputs in Simulation(step, [X], 2, variables=[slot], sharded=[slot])(X):
        assert float(outputs[0]) == 2.0


def test_other_operations_on_a_sharded_variable_are_refused():
    slot = tf.Variable(np.zeros([7, 5]))

    def step(x):
        slot.scatter_nd_add([[0]], x[:1])
        return tf.constant(0)

    with pytest.raises(ConfigError, match="keeps in shards"):
        Simulation(step, [X], 2, variables=[slot], sharded=[slot])(X)


def both(step, variables, sharded, size=3, static=True, tolerance=1e-12):
    simulation = Simulation(step, [X], size, static=static, variables=variables, sharded=sharded)
    return simulation.check(X, steps=2, tolerance=tolerance).reports[0]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_rows_are_scattered_into_their_chunks(size):
    slot, weight = tf.Variable(np.ones((5, 4))), tf.Variable(np.ones((5, 4)))

    def step(x):
        indices = tf.constant([4, 0, 4, 2])
        slot.scatter_add(tf.IndexedSlices(x[:4, :4], indices))
        slot.scatter_sub(tf.IndexedSlices(x[1:5, 1:], indices))
        weight.assign_sub(0.1 * slot)
        weight.scatter_add(tf.IndexedSlices(x[:2, :4], indices[:2]))
        return tf.reduce_sum(slot * slot)

    both(step, [slot, weight], [slot], size)


@pytest.mark.parametrize("wrong", [5, -1])
def test_index_outside_a_sharded_table_fails_as_in_one_process(wrong):
    slot = tf.Variable(np.ones((5, 4)))

    def step(x):
        slot.scatter_add(tf.IndexedSlices(x[:2, :4], tf.constant([0, wrong])))
        return tf.reduce_sum(x)

    simulation = Simulation(step, [X], 3, variables=[slot], sharded=[slot])
    for call in (simulation.expected, simulation):
        with pytest.raises(Exception, match=r"is not in \[0, "):
            call(X)
    np.testing.assert_array_equal(np.concatenate(simulation.held(slot)), np.ones(20))  # fails before the commit


def test_weight_read_in_the_middle_of_a_step_has_its_current_value():
    slot, weight = tf.Variable(np.ones((5, 4))), tf.Variable(np.ones((5, 4)))

    def step(x):
        before = tf.reduce_sum(tf.sort(weight, axis=0)[0])
        slot.assign(0.5 * slot + tf.transpose(tf.transpose(x[:, :4]) @ x))
        weight.assign_sub(0.1 * slot)
        middle = tf.reduce_sum(tf.sort(weight, axis=0)[0])
        weight.assign_add(0.5 * slot)
        weight.assign(tf.where(middle > before, weight * 2.0, weight))
        tf.cond(middle > before, lambda: weight.assign(weight - slot), lambda: weight.assign(weight + slot))
        seen = tf.numpy_function(lambda: np.float64(1.0), [], tf.float64)
        weight.assign_add(tf.ones_like(weight) * seen)
        return before, middle, tf.reduce_max(weight), tf.reduce_mean(slot), tf.norm(slot)

    both(step, [slot, weight], [slot])


@pytest.mark.long
def test_shard_enters_or_leaves_a_branch():
    slot, other = tf.Variable(np.ones((5, 4))), tf.Variable(np.ones((5, 4)))

    def step(x):
        total = tf.reduce_sum(x)
        chosen = tf.cond(total > 0.0, lambda: slot * 2.0, lambda: slot + other)
        mixed = tf.cond(total > 0.0, lambda: slot * 2.0, lambda: tf.ones([5, 4], tf.float64))
        slot.assign(0.5 * chosen + mixed)
        other.assign(tf.reverse(chosen, [0]))
        return total

    both(step, [slot, other], [slot])


def test_loop_reads_a_whole_slot_but_never_its_variable():
    slot = tf.Variable(np.ones((5, 4)))

    def whole(x):
        read = slot.read_value()
        found = tf.while_loop(
            lambda i, _: i < 3, lambda i, total: (i + 1, total * 0.5 + read), (0, tf.zeros_like(read))
        )
        slot.assign(found[1] + tf.reduce_sum(x))
        return tf.reduce_sum(found[1])

    both(whole, [slot], [slot])

    def inside(x):
        return tf.while_loop(lambda i: i < 3, lambda i: (slot.assign_add(slot), i + 1)[1:], (0,))

    with pytest.raises(ConfigError, match="keeps in shards"):
        Simulation(inside, [X], 2, variables=[slot], sharded=[slot])(X)


def test_constant_tensor_is_filled_in_chunks():
    slot, other = tf.Variable(np.ones((5, 4))), tf.Variable(np.ones((5, 4)))

    def step(x):
        total = tf.reduce_sum(x)
        slot.assign(slot + tf.fill([5, 4], total))
        whole = tf.fill([5, 4], total)
        other.assign(other * whole)
        return tf.sort(whole)[0]

    assert moves_of(both(step, [slot, other], [slot, other])) == [("sum", 1)]


def test_slot_is_combined_with_an_unknown_number_of_rows():
    slot = tf.Variable(RNG.normal(size=(5,)))

    def step(x):
        slot.assign(slot * 0.5 + tf.reduce_sum(x, 0))
        return tf.reduce_sum(tf.tanh(slot * x)), tf.reduce_sum(slot + tf.sort(x, axis=0))

    both(step, [slot], [slot], static=False)


def test_rows_stay_on_their_rank_if_they_need_a_whole_slot():
    slot = tf.Variable(RNG.normal(size=(5, 4)))

    def step(x):
        slot.assign(slot * 0.5 + 1.0)
        return tf.reduce_sum(tf.tanh(x @ slot))

    assert moves_of(both(step, [slot], [slot])) == [("all_gather", 1), ("sum", 1)]


def test_python_function_sees_a_weight_assigned_from_a_shard():
    slot, weight = tf.Variable(np.ones((5, 4))), tf.Variable(np.ones((5, 4)))
    seen = [weight]

    def step(x):
        slot.assign_add(tf.reduce_sum(x) * tf.ones_like(slot))
        with tf.control_dependencies([weight.assign_sub(0.1 * slot, read_value=False)]):
            return tf.numpy_function(lambda: seen[0].numpy().sum(), [], tf.float64)

    simulation = Simulation(step, [X], 3, variables=[slot, weight], sharded=[slot])
    expected = simulation.expected(X)
    seen[0] = simulation.copies[0][id(weight.handle)]
    for outputs in simulation(X):
        np.testing.assert_allclose(outputs, expected)


@pytest.mark.long
def test_parts_are_added_and_cast_before_they_are_scattered():
    slot, narrow, wide = tf.Variable(np.ones((5, 4))), tf.Variable(np.ones((5, 4))), tf.Variable(np.ones((5, 4)))

    def step(x):
        first, second = tf.transpose(x) @ x[:, :4], tf.transpose(x) @ x[:, 1:]
        slot.assign(slot * 0.5 + (first + second))
        halves = tf.transpose(tf.cast(x, tf.float32)) @ tf.cast(x[:, :4] > 0, tf.float32)
        narrow.assign(tf.cast(halves, tf.float64))
        wide.assign(wide + tf.cast(halves, tf.float64))
        return tf.constant(0)

    report = both(step, [slot, narrow, wide], [slot, narrow, wide], tolerance=1e-5)
    assert moves_of(report) == [("reduce_scatter", 3)]
    assert "float32" not in report.text()


@pytest.mark.long
def test_scattered_part_is_rebuilt_from_its_sum():
    slots = [tf.Variable(np.zeros(5)) for _ in range(2)]

    def step(x):
        total = tf.reduce_sum(tf.cast(x, tf.float32), 0)
        part = tf.cast(total, tf.float64)
        slots[0].assign_add(part)  # scattered
        product = tf.cast(tf.math.cumprod(total), tf.float64)
        with tf.control_dependencies([product]):  # needs all of `part` once `total` is complete
            result = tf.math.cumprod(part) * product
        slots[1].assign_add(part * tf.reduce_sum(tf.tanh(x * result), 0))
        return result

    both(step, slots, slots, tolerance=1e-3)  # values up to 55, computed in float32


def test_gradient_is_scattered_even_if_an_addend_waits_for_a_sum():
    weight, slot = tf.Variable(RNG.normal(size=[5, 4])), tf.Variable(np.zeros([5, 4]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight)) + tf.reduce_mean(x) * tf.nn.l2_loss(weight)
        slot.assign(0.9 * slot + tape.gradient(loss, weight))
        weight.assign_sub(0.1 * slot)
        return loss

    assert ("reduce_scatter", 1) in moves_of(both(step, [weight, slot], [slot]))
