"""Strategy(sharding="optimizer") on real ranks, against one process. Run by test_strategy.py."""

import keras
import numpy as np
import pytest

import keras_ddl
from keras_ddl import model_state
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.shards import gathered_slots
from strategy.common import (
    X,
    Y,
    assert_close,
    compiled,
    everyone,
    fitted,
    of_one_process,
    shared_folder,
    state,
    step_of,
)

SHARDED = keras_ddl.Strategy(sharding="optimizer")
optimizers = keras.optimizers


def assert_equals_one_process(make):
    model, expected = fitted(SHARDED, optimizer=make), of_one_process(lambda: state(fitted(None, optimizer=make)))
    assert_equal_weights(model)
    with SHARDED.whole_optimizer(model):
        found = state(model)
    assert_close(found, expected)
    return model


def assert_equal_weights(model):
    bits = everyone([each.tobytes() for each in model.get_weights()])
    assert all(each == bits[0] for each in bits), "ranks differ in some bit"


def check_adam_in_shards_equals_one_process():
    model = assert_equals_one_process(lambda: optimizers.Adam(1e-2, weight_decay=0.1, global_clipnorm=0.5))
    slots = gathered_slots.slots_of(model)
    assert len(slots) == 8, slots  # two of each of four weights
    table = SHARDED.explain(model)
    assert "reduce_scatter" in table and "all_gather" in table, table
    held = everyone([int(np.prod(each.chunk.shape)) for each in slots])
    assert all(sum(counts) == np.prod(each.shape) for counts, each in zip(zip(*held), slots))


def check_gradients_accumulate_beside_sharded_slots():
    make = lambda: optimizers.Adam(1e-2, gradient_accumulation_steps=2, clipnorm=0.3)  # noqa: E731
    model, one = fitted(SHARDED, optimizer=make), fitted(None, optimizer=make)
    assert_close(model.get_weights(), one.get_weights())
    kept = [each for each in gathered_slots.slots_of(model) if "accumulator" in each.name]
    assert not kept, kept


def check_other_optimizers_in_shards_equal_one_process():
    """Those that keep a single number beside slots, or averages that take the place of the weights."""
    assert_equals_one_process(lambda: optimizers.Nadam(1e-2))
    assert_equals_one_process(lambda: optimizers.RMSprop(1e-2, momentum=0.5, centered=True))
    assert_equals_one_process(lambda: optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=3))


def check_function_shards_slots():
    model, one = (compiled(each, optimizer=lambda: optimizers.Adam(1e-2, clipnorm=0.2)) for each in (SHARDED, None))
    cut, plain = SHARDED.function(step_of(model)), tf.function(step_of(one))
    for begin in range(0, 40, 10):
        for step in (cut, plain):
            step(X[begin : begin + 10], Y[begin : begin + 10])
    assert len(gathered_slots.slots_of(model.optimizer)) == 8
    assert_equal_weights(model)
    assert_close(model.get_weights(), one.get_weights())


def check_unsupported_optimizers_are_refused_by_name():
    for make in (optimizers.Adafactor, optimizers.Muon, type("Own", (optimizers.Adam,), {})):
        with pytest.raises(ConfigError, match=f"Received: {make.__name__}"):
            fitted(SHARDED, optimizer=lambda: make(1e-2))  # noqa: B023


def check_sharded_slots_are_read_only_in_whole_optimizer():
    model = fitted(SHARDED, optimizer=lambda: optimizers.Adam(1e-2), epochs=1)
    slot = next(each for each in model.optimizer.variables if each.name.endswith("momentum"))
    for read in (
        lambda: slot.numpy(),
        lambda: slot + 1,
        lambda: np.asarray(slot.value),
        lambda: model.optimizer.get_weights() if hasattr(model.optimizer, "get_weights") else slot.numpy(),
        lambda: tf.function(lambda: slot.value * 2.0, autograph=False)(),
        lambda: SHARDED.run(lambda: slot.value * 2.0),
        lambda: slot.assign_add(slot),
    ):
        with pytest.raises((ConfigError, ValueError), match="keeps in shards"):  # TensorFlow wraps errors of operands
            read()
    assert "ShardedVariable" in repr(slot.value)
    with SHARDED.whole_optimizer(model):
        whole = slot.numpy()
    assert np.abs(whole).max() > 0 and whole.shape == tuple(slot.shape)
    slot.assign(2 * whole)
    with SHARDED.whole_optimizer(model.optimizer):
        np.testing.assert_array_equal(slot.numpy(), 2 * whole)
    with pytest.raises(ConfigError, match="needs a model, or an optimizer. Received: None"):
        SHARDED.whole_optimizer(None)


def check_sharded_averages_swap_with_weights():
    def swapped(strategy):
        swaps = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
        return fitted(
            strategy, optimizer=lambda: optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9), callbacks=swaps
        )

    model, one = swapped(SHARDED), swapped(None)
    assert_equal_weights(model)
    assert_close(model.get_weights(), one.get_weights())


def check_run_and_eager_steps_are_refused():
    with pytest.raises((ConfigError, ValueError), match="keeps in shards"):
        fitted(SHARDED, optimizer=lambda: optimizers.Adam(1e-2), run_eagerly=True)
    with SHARDED.scope():
        weight = keras.Variable(np.ones((6, 3)), dtype="float64")
        optimizer = optimizers.Adam(1e-2)
        optimizer.build([weight])
    with pytest.raises((ConfigError, ValueError), match="in strategy.run"):
        SHARDED.run(tf.function(lambda: optimizer.apply([tf.ones((6, 3), "float64")], [weight]), autograph=False))


def check_keras_saves_and_restores_sharded_slots():
    make = lambda: optimizers.Adam(1e-2)  # noqa: E731
    with shared_folder() as folder:
        saver = keras.callbacks.ModelCheckpoint(folder / "model.keras")
        backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
        model = fitted(SHARDED, optimizer=make, callbacks=[saver, backup])
        keras_ddl.barrier(name="test/saved")
        loaded = of_one_process(lambda: state(keras.models.load_model(folder / "model.keras")))
        with SHARDED.whole_optimizer(model):
            assert_close(loaded, state(model), 0)
            model.save(folder / "own.keras")
        again = fitted(
            SHARDED, optimizer=make, epochs=3, callbacks=[keras.callbacks.BackupAndRestore(folder / "backup")]
        )
        expected = of_one_process(lambda: fitted(None, optimizer=make, epochs=3).get_weights())
        assert_close(again.get_weights(), expected)
        with pytest.raises(ConfigError, match="keeps in shards"):
            model_state.save_checkpoint(model, folder / "own", 1)


def check_momentum_follows_the_learning_rate():
    def make():
        return optimizers.SGD(1e-2, momentum=0.9)

    def warmup():
        return keras_ddl.callbacks.LearningRateWarmup(warmup_epochs=2)

    model = fitted(SHARDED, optimizer=make, callbacks=[warmup()])
    one = fitted(keras_ddl.Strategy(sharding=None), optimizer=make, callbacks=[warmup()])
    assert gathered_slots.slots_of(model) and not gathered_slots.slots_of(one)
    assert_close(model.get_weights(), one.get_weights())


def check_restoring_the_last_good_state_restores_chunks():
    from keras_ddl.callbacks._last_good import InMemorySnapshots

    model = fitted(SHARDED, optimizer=lambda: optimizers.Adam(1e-2), epochs=1)
    memory = InMemorySnapshots(model)
    memory.confirm()
    chunks = [each.chunk.numpy() for each in gathered_slots.slots_of(model)]
    model.fit(X, Y, batch_size=10, verbose=0)
    assert memory.go_back() is not None
    for mine, before in zip(gathered_slots.slots_of(model), chunks):
        np.testing.assert_array_equal(mine.chunk.numpy(), before)
