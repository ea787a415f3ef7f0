"""Strategy(layout=..., sharding="optimizer"), and functions on a mesh, on 2 x 2 ranks. Run by test_mesh.py."""

import keras
import numpy as np

import keras_ddl
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import RankMismatchError
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.shards.mesh_slots import MeshSlot
from strategy.common import RANK, SIZE, X, Y, fitted, raises, shared_folder, step_of
from strategy.mesh_models import SHARDING, STRATEGY, alone, assert_equal, compiled, fit_both


def check_sharded_slices_of_slots_equal_one_process():
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


def check_sharded_slices_with_accumulated_gradients_equal_one_process():
    make = lambda: keras.optimizers.Adam(1e-2, amsgrad=True, gradient_accumulation_steps=2)  # noqa: E731
    model, one = (compiled(each, few_cut, make) for each in (SHARDING, None))
    for each in (model, one):
        each.fit(X, Y, batch_size=20, verbose=0)
    assert_equal(model, one)
    slots = gathered_slots.slots_of(model.optimizer)
    assert {each.axis for each in slots} >= {0, 1, None}


def few_cut() -> keras.Model:
    inputs = keras.Input((6,))
    first = keras.layers.Dense(5, name="replicated")(inputs)  # its slots are shared out among the data ranks
    hidden = keras.layers.Dense(8, activation="tanh", name="dense_wide")(first)
    return keras.Model(inputs, keras.layers.Dense(2, name="dense_narrow")(hidden))


def check_training_with_sharded_slices_resumes():
    one = fitted(None, few_cut, epochs=3)
    with shared_folder() as path:
        for epochs, strategy in enumerate((SHARDING, SHARDING, STRATEGY), 1):  # at last without shards
            save = keras_ddl.callbacks.Checkpoint(path, resume=True, save_best=False, export_base=False)
            model = fitted(strategy, few_cut, epochs=epochs, callbacks=[save])
        assert_equal(model, one)


layers = keras.layers
LAYOUT = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
LAYOUT[".*dense_wide/kernel"] = (None, "model")
KERNELS = keras_ddl.Strategy(layout=LAYOUT)


def normalized():
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, name="dense_wide")(inputs)
    # The activation comes between: what BatchNormalization subtracts has no gradient but rounding.
    hidden = layers.BatchNormalization()(layers.PReLU()(layers.LayerNormalization()(hidden)))
    return keras.Model(inputs, layers.Dense(2)(hidden), name="normalized")


def check_mesh_step_may_use_uncut_weights():
    model, one = compiled(KERNELS, normalized), alone(normalized)
    step, plain = KERNELS.function(step_of(model)), tf.function(step_of(one)) if one is not None else None
    for begin in (0, 11, 22):
        batch = X[begin : begin + 11], Y[begin : begin + 11]
        loss = step(*batch)
        if plain is not None:
            np.testing.assert_allclose(loss, plain(*batch), rtol=0, atol=1e-12)
    assert_equal(model, one)


def check_differing_mesh_steps_are_refused():
    kept = tf.constant(np.random.default_rng(RANK).normal(size=(6, 40)))
    step = KERNELS.function(lambda x: x @ kept)
    raises(RankMismatchError, r"kept \(float64\[6, 40\].*on rank 0, and .* on rank 1", lambda: step(tf.constant(X)))
