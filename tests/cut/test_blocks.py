"""Large variables in shards that are updated in blocks of entries, in their memory, after the commit."""

import keras
import numpy as np
import pytest
from cut.simulated import Simulation
from cut.test_gathered_weights import Trained
from cut.test_table_rows import IDS, OPTIMIZERS, RNG, LookedUp, adam, once, tied

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.commit import after_commit, blocks

LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def small_blocks(float64, monkeypatch):
    keras.utils.set_random_seed(3)
    monkeypatch.setattr(after_commit, "_SMALL", 500)
    monkeypatch.setattr(blocks, "_BLOCK", 32)


def loops_of(simulation, *arguments):
    """Returns how many variables each loop of rank 0 updates."""
    graph = simulation.graph_of_rank_0(*arguments)
    found = [each for each in graph.get_operations() if each.type == "StatelessWhile"]
    writers = [each for each in graph.get_operations() if each.type == "AssignVariableOp"]
    return [sum(each.inputs[1].op is loop for each in writers) for loop in found]


def looked_up(call, optimizer, size=3):
    return Trained(LookedUp(call), [IDS], size=size, optimizer=optimizer, least=50)


def sgd():
    return keras.optimizers.SGD(0.1)


def address(variable):
    values = [variable.read_value() for _ in range(2)]
    one, other = (np.asarray(each).__array_interface__["data"][0] for each in values)
    assert one == other  # a read copies nothing
    return one


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=LONG)])
def test_a_table_and_its_slots_are_updated_by_one_loop_in_their_memory(size):
    trained = looked_up(once, adam(), size)
    trained.train(steps=1)
    assert loops_of(trained.simulation, IDS) == [3]
    held = [copies[id(each.handle)] for copies in trained.simulation.copies for each in trained.sharded]
    before = list(map(address, held))
    trained.train(steps=2)
    assert list(map(address, held)) == before


def test_rows_are_scattered_in_the_memory_of_the_table():
    trained = looked_up(once, sgd(), 2)
    trained.train(steps=1)
    types = {each.type for each in trained.simulation.graph_of_rank_0(IDS).get_operations()}
    assert "InplaceSub" in types and "ResourceScatterSub" not in types
    held = [copies[id(each.handle)] for copies in trained.simulation.copies for each in trained.sharded]
    before = list(map(address, held))
    trained.train(steps=2)
    assert list(map(address, held)) == before


@pytest.mark.parametrize("optimizer", [adam, sgd])
def test_a_value_that_somebody_holds_does_not_change(optimizer):
    trained = looked_up(once, optimizer(), 2)
    held = [copies[id(each.handle)].read_value() for copies in trained.simulation.copies for each in trained.sharded]
    before = [np.array(each) for each in held]
    trained.train(steps=2)
    np.testing.assert_equal([np.asarray(each) for each in held], before)


IN_BLOCKS = {name: OPTIMIZERS[name] for name in ("momentum", "ftrl", "clipped by norm", "clipped by all norms")}
IN_BLOCKS["averaged"] = lambda: adam(weight_decay=0.1, use_ema=True)


@LONG
@pytest.mark.parametrize("call", [once, tied])
@pytest.mark.parametrize("name", {**OPTIMIZERS, **IN_BLOCKS})
def test_optimizers_in_blocks_equal_one_process(name, call):
    trained = looked_up(call, {**OPTIMIZERS, **IN_BLOCKS}[name]())
    trained.train(steps=3)
    loops = loops_of(trained.simulation, IDS)
    assert name not in IN_BLOCKS or len(loops) == 1 and loops[0] >= 2, loops


def test_kernels_in_shards_are_updated_in_blocks():
    dense = keras.layers.Dense(17, activation="tanh")
    trained = Trained(keras.Sequential([keras.Input((13,)), dense]), [RNG.normal(size=(7, 13))], size=2, least=50)
    trained.train()
    assert loops_of(trained.simulation, *trained.batch) == [3]


@pytest.mark.parametrize("wrong", [211, 10_000])
def test_an_index_out_of_range_writes_nothing(wrong):
    table = tf.Variable(RNG.normal(size=(211, 4)))

    def step(ids):
        added = tf.math.unsorted_segment_sum(tf.ones([35, 4], tf.float64), tf.reshape(ids, [-1]), 211)
        table.assign_sub(added)
        return tf.reduce_sum(tf.cast(ids, tf.float64))

    simulation = Simulation(step, [IDS], 2, variables=[table], sharded=[table], weights=[table.handle])
    simulation.check(IDS)
    assert loops_of(simulation, IDS) == [1]
    before, ids = simulation.everything(), IDS.copy()
    ids[0, 2] = wrong
    simulation.exchange._timeout = 1
    for call in (simulation.expected, simulation):
        with pytest.raises(tf.errors.InvalidArgumentError):
            call(ids)
    np.testing.assert_equal(simulation.everything(), before)
