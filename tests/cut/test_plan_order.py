"""The plan orders a step's sums so that each comes after the sums it needs."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from cut.simulated import SimulatedCollectives, Simulation

from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.values.collectives import PLAIN, Depths, Reduction, StepCollectives, can_run

X = np.random.default_rng(0).normal(size=(6, 4))


def deep(x):
    for _ in range(12):
        x = tf.tanh(x)
    return x


def needed(tensors):
    """Returns the operations that tensors depend on, ignoring the control edges that order simulated collectives."""
    stack, seen = [each.op for each in tensors], set()
    while stack:
        each = stack.pop()
        if each not in seen:
            seen.add(each)
            stack += [tensor.op for tensor in each.inputs]
            if each.type != "PyFunc":
                stack += [before for before in each.control_inputs if before.type != "PyFunc"]
    return seen


@pytest.fixture
def sums(monkeypatch):
    """Records rank 0's sums: names, depths, tensors, operations."""
    records, reduce = [], SimulatedCollectives.reduce

    def recorded(self, tensors, op, name, how=PLAIN):
        results = reduce(self, tensors, op, name, how)
        if self.rank == 0:
            records.append(
                SimpleNamespace(name=name, depths=how.depths, tensors=tensors, made={each.op for each in results})
            )
        return results

    monkeypatch.setattr(SimulatedCollectives, "reduce", recorded)
    return records


def check(step, sums, variables=(), *, in_branches=False, **options):
    """Checks results and the plan. Returns the sums' numbers in graph order, listed in the order of the plan."""
    Simulation(step, [X], 2, variables=variables, **options).check(X)
    depths = {each.name: each.depths for each in sums if each.depths is not None}
    plan = StepCollectives._by_depth(SimpleNamespace(_depths=depths, _is_in_branches=in_branches), sums)
    for place, each in enumerate(plan):
        before = needed(each.tensors)
        late = [other.name for other in plan[place + 1 :] if before & other.made]
        assert not late, f"{each.name} needs {late}"
    return [sums.index(each) for each in plan]


def test_plan_sends_ready_sums_first(sums):
    def step(x):
        low, high = tf.reduce_max(x, 0), tf.reduce_sum(deep(x), 0)
        return tf.exp(high), tf.exp(tf.reduce_sum(tf.tanh(x * tf.exp(low)), 0))

    assert check(step, sums) == [0, 2, 1, 3]


def test_plan_delays_gathers_of_weights_that_wait_for_other_sums(sums):
    weights = [tf.Variable(np.full([4, 4], number)) for number in (0.3, 0.2)]

    def step(x):
        low, high = tf.reduce_max(x, 0), tf.reduce_sum(deep(x), 0)
        first = high[tf.newaxis] @ weights[0]
        return first, tf.exp(tf.reduce_sum((x * tf.exp(low)) @ weights[1], 0))  # gathered after the first one's use

    options = {"sharded": weights, "weights": [each.handle for each in weights], "gathered_bytes": 1}
    assert check(step, sums, weights, **options) == [0, 1, 2, 3]


def test_plan_ignores_values_rebuilt_between_two_nodes(sums):
    def step(x):
        low, high = tf.reduce_max(x, 0), tf.reduce_sum(deep(x), 0)
        part = high * 3.0 / 2.0
        late, total = tf.exp(low * 2.0), tf.exp(tf.reduce_sum(tf.tanh(x * tf.exp(low)), 0))
        with tf.control_dependencies([late]):
            after = tf.identity(total)
        # When `late` has been built, `part` is rebuilt from `high` before the addition.
        return part + total, tf.exp(high), tf.exp(tf.reduce_sum(tf.tanh(x * after), 0))

    assert check(step, sums) == [0, 2, 3, 1, 4]


def test_plan_follows_the_graph_if_branches_with_collectives_depend_on_each_other(sums):
    def step(x):
        low, high = tf.reduce_max(x, 0), tf.reduce_sum(deep(x), 0)
        first, second = (
            tf.cond(chosen, lambda more=more: tf.math.cumsum(x + more)[:3], lambda: x[:3])
            for chosen, more in ((high[0] < 1e3, 1.0), (low[0] < 1e3, 2.0))
        )
        return first, tf.exp(tf.reduce_sum(tf.tanh(x * second[0]), 0))

    assert check(step, sums, in_branches=True) == [0, 1, 2, 3]


@pytest.fixture
def collectives(monkeypatch):
    """Yields the collectives of a step in a separate graph, where sums are identities."""
    monkeypatch.setattr(ops, "all_reduce_n", lambda tensors, **_: [tf.identity(tensors[0], name="sum")])
    monkeypatch.setattr(ops, "all_gather", lambda tensor, **_: tensor)
    with tf.Graph().as_default():
        yield StepCollectives("scope", 0, 2, lambda sizes, dtypes: [])


def sum_of(collectives, *depths):
    return collectives.reduce([tf.ones([])], "sum", "", Reduction(Depths(*depths) if depths else None))[0].op


def test_plan_sends_a_bucket_before_sums_it_cannot_need(collectives):
    depths = {"a": (1, 1), "b": (5, 5), "c": (9, 9), "commit": (), "x": (9, 9), "of c": (2, 10), "early": (1, 6)}
    sums = {name: sum_of(collectives, *each) for name, each in depths.items()}
    names = {operation: name for name, operation in sums.items()}

    def planned(*order):
        return [names[each] for each in collectives._by_depth([sums[name] for name in order])]

    assert planned("a", "b", "c", "early") == ["a", "b", "early", "c"]
    assert planned("a", "b", "c", "of c", "early") == ["a", "b", "c", "of c", "early"]
    assert planned("a", "c", "x") == ["a", "c", "x"]  # equally deep, so one may need the other
    assert planned("a", "c", "commit", "early") == ["a", "c", "commit", "early"]


def test_plan_takes_the_depths_of_its_own_graph(collectives):
    for depth in (1, 2):
        sum_of(collectives, depth, depth)
    with tf.Graph().as_default():  # the graph of a branch
        sum_of(collectives, 9, 9)
    assert collectives._depths == {"sum": Depths(1, 1), "sum_1": Depths(2, 2)}


@pytest.mark.parametrize("in_branch", [False, True])
def test_plan_knows_whether_there_are_collectives_in_branches(collectives, in_branch):
    deep, early = sum_of(collectives, 9, 9), sum_of(collectives, 1, 1)
    with tf.Graph().as_default() if in_branch else contextlib.nullcontext():
        collectives.gather(tf.ones([1]), "")
    assert collectives._by_depth([deep, early]) == ([deep, early] if in_branch else [early, deep])


def test_plan_keeps_the_order_of_the_graph_if_another_cannot_run():
    with tf.Graph().as_default():
        first = tf.add(1.0, 2.0).op
        second = tf.exp(first.outputs[0]).op
        with tf.control_dependencies([tf.negative(second.outputs[0])]):
            third = tf.add(3.0, 4.0).op
        other = tf.add(5.0, 6.0).op
    assert can_run([first, second, third, other]) and can_run([other, first, second, third])
    assert not can_run([second, first]) and not can_run([third, other, first])
