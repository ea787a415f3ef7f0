"""Steps of the program on a mesh, where variables that every rank has in full meet values that are cut: their slices
begin elsewhere on each rank, though all ranks have traced the same. Run by test_mesh.py.
"""

import keras
import numpy as np

import keras_ddl
from keras_ddl import checkpoint as ckpt
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import RankMismatchError
from strategy.common import RANK, SIZE, X, Y, raises, shared_folder, step_of
from strategy.mesh_models import alone, assert_equal, compiled

layers = keras.layers
LAYOUT = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
LAYOUT[".*dense_wide/kernel"] = (None, "model")
KERNELS = keras_ddl.Strategy(layout_map=LAYOUT)


def normalized():
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, name="dense_wide")(inputs)
    # The activation comes between: what BatchNormalization subtracts has no gradient but rounding.
    hidden = layers.BatchNormalization()(layers.PReLU()(layers.LayerNormalization()(hidden)))
    return keras.Model(inputs, layers.Dense(2)(hidden), name="normalized")


def check_a_step_on_a_mesh_may_use_weights_that_are_not_cut():
    model, one = compiled(KERNELS, normalized), alone(normalized)
    step, plain = KERNELS.function(step_of(model)), tf.function(step_of(one)) if one is not None else None
    for begin in (0, 11, 22):
        batch = X[begin : begin + 11], Y[begin : begin + 11]
        loss = step(*batch)
        if plain is not None:
            np.testing.assert_allclose(loss, plain(*batch), rtol=0, atol=1e-12)
    assert_equal(model, one)


def check_a_checkpoint_on_a_mesh_answers_a_sample_of_the_user():
    model = compiled(KERNELS, normalized)
    with shared_folder() as path:
        save = keras_ddl.callbacks.Checkpoint(path, save_best=False, sample=X[:3])
        model.fit(X, Y, batch_size=10, verbose=0, callbacks=[save])
        expected = model.predict(X[:3], verbose=0)
        with np.load(ckpt.latest(path).path / "golden.npz") as golden:
            (answers,) = (golden[name] for name in golden.files if name.startswith("answers:"))
        np.testing.assert_allclose(answers, expected, rtol=0, atol=1e-12)


def check_steps_on_a_mesh_that_differ_are_refused():
    kept = tf.constant(np.random.default_rng(RANK).normal(size=(6, 40)))
    step = KERNELS.function(lambda x: x @ kept)
    raises(RankMismatchError, r"kept \(float64\[6, 40\].*on rank 0, and .* on rank 1", lambda: step(tf.constant(X)))
