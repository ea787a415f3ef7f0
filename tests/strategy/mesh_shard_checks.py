"""Strategy(layout_map=..., shard_optimizer=True) on real ranks, 2 x 2, against one process. Run by test_mesh.py."""

from typing import Any

import keras
import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.strategy.mesh.mesh_slots import MeshSlot
from keras_ddl.strategy.shards import gathered_slots
from strategy.common import SIZE, X, Y, shared_folder
from strategy.mesh_models import (
    SHARDING,
    STRATEGY,
    alone,
    assert_equal,
    compiled,
    fit_both,
)


def check_slots_in_shards_of_slices_equal_one_process():
    make = lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.5, use_ema=True)  # noqa: E731
    model, one = compiled(SHARDING, optimizer=make), alone(optimizer=make)
    fit_both(model, one, X, Y, batch_size=10, epochs=2, verbose=0)
    assert_equal(model, one)
    slots = [each for each in gathered_slots.slots_of(model.optimizer) if isinstance(each, MeshSlot)]
    assert len(slots) == 3 * 3  # both kernels, the wide bias; not the narrow one, of two numbers
    assert all(np.prod(each.chunk.shape) * SIZE == np.prod(each.shape) for each in slots)
    with SHARDING.whole_optimizer(model):
        assert np.any(slots[0].numpy())
    of_batch = SHARDING.explain(model).partition("along the batch axis")[2]
    assert "reduce_scatter" in of_batch and "all_gather" in of_batch, of_batch


def equals_one_process_in_shards(make: Any) -> None:
    model, one = (compiled(each, few_cut, make) for each in (SHARDING, None))
    for each in (model, one):
        each.fit(X, Y, batch_size=20, verbose=0)
    assert_equal(model, one)
    slots = [each for each in gathered_slots.slots_of(model.optimizer) if isinstance(each, MeshSlot)]
    assert {each.layout.axis for each in slots} >= {0, 1, None}


@long
def check_slots_in_shards_of_slices_with_momentum_and_clipping_equal_one_process():
    equals_one_process_in_shards(lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True, clipnorm=0.1))


@long
def check_slots_in_shards_of_slices_with_accumulated_gradients_equal_one_process():
    equals_one_process_in_shards(lambda: keras.optimizers.Adam(1e-2, amsgrad=True, gradient_accumulation_steps=2))


@long
def check_slots_in_shards_of_slices_with_loss_scaling_equal_one_process():
    inner = lambda: keras.optimizers.Adagrad(1e-2)  # noqa: E731
    equals_one_process_in_shards(lambda: keras.optimizers.LossScaleOptimizer(inner(), initial_scale=64.0))


def few_cut() -> keras.Model:
    inputs = keras.Input((6,))
    first = keras.layers.Dense(5, name="replicated")(inputs)  # its slots are shared out among the data ranks
    hidden = keras.layers.Dense(8, activation="tanh", name="dense_wide")(first)
    return keras.Model(inputs, keras.layers.Dense(2, name="dense_narrow")(hidden))


@long
def check_a_training_with_slots_in_shards_of_slices_is_resumed():
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}

    def fit(strategy: Any, epochs: int, *callbacks: Any) -> keras.Model:
        model = compiled(strategy, few_cut)
        model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options)
        return model

    one = fit(None, 2)
    with shared_folder() as path:
        for strategy, epochs in ((SHARDING, 1), (SHARDING, 2)):
            save = keras_ddl.callbacks.Checkpoint(path, resume=True, save_best=False, export_base=False)
            assert_equal(fit(strategy, epochs, save), one if epochs == 2 else fit(None, 1))
    with shared_folder() as path:
        for strategy, epochs in ((SHARDING, 1), (STRATEGY, 2)):  # resumed without shards
            save = keras_ddl.callbacks.Checkpoint(path, resume=True, save_best=False, export_base=False)
            model = fit(strategy, epochs, save)
        assert_equal(model, one)
