"""`Strategy(layout=...)` on 2 x 2 ranks, compared with one process. Run by test_mesh.py."""

from typing import Any

import keras
import numpy as np
import pytest
from cut.layouts import transformer

import keras_ddl
from harness.rank_program import long
from keras_ddl import checkpoint as ckpt
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, DriftError
from keras_ddl.strategy.shards import gathered_slots, laid_out
from keras_ddl.strategy.shards.laid_out import LaidOutVariable
from strategy.common import (
    RANK,
    SIZE,
    X,
    Y,
    assert_close,
    dense_model,
    gathers,
    of_one_process,
    set_precision,
    shared_folder,
)
from strategy.mesh_models import LABELS, STRATEGY, TOKENS, alone, assert_equal, assert_saved_in_slices, compiled


def check_fit_and_evaluate_equal_one_process():
    model, one = compiled(STRATEGY), alone()
    mesh = STRATEGY.job.mesh
    before = mesh.data.native().count()
    with shared_folder() as path, gathers() as gathered:
        save = keras_ddl.callbacks.Checkpoint(path, export_base=False, save_best=False, keep=1)
        model.fit(X, Y, batch_size=10, epochs=2, verbose=0, callbacks=[save])
        if one is not None:
            one.fit(X, Y, batch_size=10, epochs=2, verbose=0)
        assert gathered == []
        assert_saved_in_slices(ckpt.latest(path), one)
    batch_counts, model_counts = mesh.data.native().count(), mesh.model.native().count()
    for count in (batch_counts, model_counts):  # ranks that arrive together may run small collectives inline
        assert count["planned"] + count["ran_inline"] > count["fell_back"], count
    if batch_counts["fell_back"] == 0:  # no rank was seconds late
        assert batch_counts["coordinated"] == before["coordinated"], batch_counts
    expected = of_one_process(lambda: one.evaluate(X, Y, batch_size=10, verbose=0))
    np.testing.assert_allclose(model.evaluate(X, Y, batch_size=10, verbose=0), expected, atol=1e-12)
    assert_equal(model, one)
    table = STRATEGY.explain(model)
    assert "along the model axis, 2 ranks" in table and f"along the batch axis, {SIZE // 2} ranks" in table, table


def check_initial_slices_equal_one_process():
    def custom_initializer(shape: Any, dtype: Any = None) -> Any:
        return np.arange(np.prod(shape), dtype=dtype)

    def made() -> list[keras.Variable]:
        kernels = ["glorot_uniform", "he_normal", "random_normal", keras.initializers.Constant(0.3), "orthogonal"]
        layers = [keras.layers.Dense(12, kernel_initializer=each, name="dense_wide") for each in kernels]
        layers.append(keras.layers.Dense(12, bias_initializer=custom_initializer, name="dense_wide"))
        for each in layers:
            each.build((None, 6))
        return [variable for each in layers for variable in each.variables]

    set_precision("float64")
    in_full = []
    send = laid_out.replicate.broadcast_value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laid_out.replicate, "broadcast_value", lambda *args: in_full.append(args) or send(*args))
        keras.utils.set_random_seed(RANK)  # the Strategy uses rank 0's seed
        with STRATEGY.scope():
            variables = made()
    keras.utils.set_random_seed(0)
    cut = gathered_slots.slots_in(variables)
    assert len(cut) == 12 and len(in_full) == 2, in_full  # drawn whole: orthogonal, custom_initializer
    with gathered_slots.gathered(cut):
        for mine, expected in zip(variables, made(), strict=True):
            np.testing.assert_array_equal(mine.numpy(), expected.numpy(), err_msg=mine.path)


@long
def check_a_transformer_in_fit_evaluate_and_predict_equals_one_process():
    def trained(strategy: Any) -> tuple[keras.Model, list[Any]]:
        set_precision("float64")  # the loss uses it, too
        adam = lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.5)  # noqa: E731
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = compiled(strategy, lambda: transformer(blocks=1), adam, loss, metrics=["accuracy"])
        options = {"batch_size": 7, "verbose": 0}
        history = model.fit(TOKENS, LABELS, epochs=1, validation_data=(TOKENS, LABELS), **options).history
        return model, [*history.values(), model.predict(TOKENS[:9], **options)]

    (model, mine), (one, expected) = trained(STRATEGY), trained(None)
    assert_close(mine, expected)
    assert_equal(model, one)
    table = STRATEGY.explain(model)
    train_table = table[: table.index("test_step")]
    along_model = train_table[: train_table.index("along the batch axis")]
    assert "along the model axis, 2 ranks" in along_model and "gather" not in along_model, table
    cut = gathered_slots.slots_of(model)
    assert len(cut) == 10 * 3, cut  # 10 weights, two slots each
    assert all(np.prod(each.chunk.shape) * 2 == np.prod(each.shape) for each in cut)


@long
def check_split_sequences_equal_one_process():
    mesh = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
    in_parts = keras_ddl.Strategy(layout=mesh, data_layout=("batch", "model"))
    set_precision("float64")  # the loss uses it, too
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    models, outputs = [], []
    for strategy in (in_parts, None):
        model = compiled(strategy, lambda: transformer(blocks=1, length=4), loss=loss, metrics=["accuracy"])
        history = model.fit(TOKENS[:, :4], LABELS[:, :4], batch_size=7, epochs=2, verbose=0).history
        outputs.append([*history.values(), model.predict(TOKENS[:9, :4], verbose=0)])
        models.append(model)
    for values, expected in zip(*outputs, strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)
    assert_equal(*models)
    assert "along the model axis, 2 ranks" in in_parts.explain(models[0])


def check_drift_between_copies_of_a_slice_is_reported():
    model = compiled(STRATEGY)
    kernel = model.get_layer("dense_wide").kernel

    def change(*_: Any) -> None:
        if RANK == SIZE - 1:
            kernel.value.chunk.assign_add(tf.one_hot([0] * 6, 4, 1e-9, 0.0, dtype=tf.float64))

    with pytest.raises(DriftError, match=rf"dense_wide.*kernel on rank {SIZE - 1} differs from rank 1; .*6 of 24"):
        model.fit(X, Y, batch_size=10, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=change)])


@long
def check_cut_variables_are_refused_outside_steps():
    model = compiled(STRATEGY)
    assert any(isinstance(each.value, LaidOutVariable) for each in model.variables)
    refused = [
        lambda: model(X[:3]),
        lambda: STRATEGY.run(lambda: 1),
        lambda: model.predict_on_batch(X[:3]),
    ]
    for each in refused:
        with pytest.raises(ConfigError, match="layout"):
            each()
    with pytest.raises(tf.errors.InvalidArgumentError, match="a read in a graph"):
        tf.function(lambda: tf.add_n([tf.nn.l2_loss(each.value) for each in model.variables]))()
    eager = compiled(STRATEGY, run_eagerly=True)
    with pytest.raises(ConfigError, match="run_eagerly=True"):
        eager.fit(X, Y, batch_size=10, verbose=0)


@long
def check_variable_made_outside_the_scope_is_refused():
    set_precision("float64")
    hidden = keras.layers.Dense(8, name="dense_wide")
    hidden.build((None, 6))
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(2, name="dense_narrow")])
        model.compile("sgd", "mse")
    step = STRATEGY.function(lambda x: hidden(x))
    for each in (lambda: model.fit(X, Y, batch_size=10, verbose=0), lambda: step(X[:4])):
        with pytest.raises(ConfigError, match="'dense_wide/kernel' of shape.*made outside"):
            each()


@long
def check_unmatched_layout_keys_are_reported():
    other = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
    other["nothing"] = ("model",)
    strategy = keras_ddl.Strategy(layout=other)
    set_precision("float64")
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="match no path"):
        model.fit(X, Y, batch_size=10, verbose=0)
