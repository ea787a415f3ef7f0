"""Strategy(layout_map=...) on real ranks, 2 x 2, against one process. Run by test_mesh.py."""

import contextlib
import errno
import io
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from cut.layouts import transformer

import keras_ddl
from harness.rank_program import long
from keras_ddl import checkpoint as ckpt
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.snapshot import Snapshot
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import after_commit, requests
from keras_ddl.errors import CheckpointError, ConfigError, DriftError
from keras_ddl.strategy.mesh import laid_out
from keras_ddl.strategy.mesh.laid_out import LaidOutVariable
from keras_ddl.strategy.mesh.layout import Layout
from keras_ddl.strategy.mesh.mesh_slots import MeshSlot
from keras_ddl.strategy.shards import gathered_slots
from strategy.common import RANK, SIZE, X, Y, dense_model, everyone, set_precision, shared_folder

LAYOUT = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
LAYOUT[".*attention.*(query|key|value)/kernel"] = (None, "model", None)
LAYOUT[".*attention.*(query|key|value)/bias"] = ("model", None)
LAYOUT[".*attention.*attention_output/kernel"] = ("model", None, None)
LAYOUT[".*(up0|dense_wide)/kernel"] = (None, "model")
LAYOUT[".*(up0|dense_wide)/bias"] = ("model",)
LAYOUT[".*(down0|dense_narrow)/kernel"] = ("model", None)
STRATEGY = keras_ddl.Strategy(layout_map=LAYOUT, drift_check_percent=100)

after_commit._SMALL = requests._ALONE = 1  # updates, and gathers of new weights, wait for the commit as large ones do
SHARDING = keras_ddl.Strategy(layout_map=LAYOUT, shard_optimizer=True)  # ZeRO 1 beside the model axis
SHARDING.job.shards_from_elements = 4

TOKENS, LABELS = (np.random.default_rng(3).integers(0, 16, (23, 5)).astype("int32") for _ in range(2))


def dense() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh", name="dense_wide")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="dense_narrow")(hidden), name="dense_model")


def compiled(strategy: Any, make: Any = dense, optimizer: Any = None, loss: Any = "mse", **more: Any) -> keras.Model:
    set_precision("float64")
    keras.utils.set_random_seed(11)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
        model.compile(optimizer() if optimizer else keras.optimizers.Adam(1e-2), loss, jit_compile=False, **more)
    return model


def assert_equal(model: keras.Model, one: keras.Model) -> None:
    with STRATEGY.whole_model(model):  # of either Strategy
        mine = [each.numpy() for each in [*model.variables, *model.optimizer.variables]]
    theirs = [each.numpy() for each in [*one.variables, *one.optimizer.variables]]
    for value, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


def assert_saved_in_slices(saved: ckpt.Checkpoint, one: keras.Model) -> None:
    """The two ranks of a model axis have written each half of what is cut; TensorFlow reads all of it."""
    assert saved.state is not None
    files = sorted(file for file in saved.state["files"] if ".data-" in file)
    assert files == [f"{each}.data-0000{i}-of-00002" for each in ("optimizer", "weights") for i in range(2)], files
    held = bundle.read(saved.weights, {key: "float64" for key, _, _ in saved.state["weights"]})
    for mine, expected in zip(held.values(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-12)
    half = 8 * (6 * 8 + 8 + 8 * 2) // 2  # bytes of what is cut; Adam has two slots of each
    assert [(saved.path / file).stat().st_size for file in files[1::2]] == [2 * half, half]


def check_fit_and_evaluate_equal_one_process():
    model, one = compiled(STRATEGY), compiled(None)
    mesh = STRATEGY.job.mesh
    before = mesh.data.native().count()
    with shared_folder() as path, gathers() as gathered:
        save = keras_ddl.callbacks.Checkpoint(path, export_base=False, save_best=False, keep=1)
        model.fit(X, Y, batch_size=10, epochs=2, verbose=0, callbacks=[save])
        one.fit(X, Y, batch_size=10, epochs=2, verbose=0)
        assert gathered == []
        assert_saved_in_slices(ckpt.latest(path), one)
    of_batch, of_model = mesh.data.native().count(), mesh.model.native().count()
    assert of_batch["coordinated"] == before["coordinated"] and of_batch["planned"] > 0, of_batch
    assert of_model["planned"] > 0 == of_model["fell_back"] == of_batch["fell_back"], of_model
    np.testing.assert_allclose(
        model.evaluate(X, Y, batch_size=10, verbose=0), one.evaluate(X, Y, batch_size=10, verbose=0), atol=1e-12
    )
    assert_equal(model, one)
    table = STRATEGY.explain(model)
    assert "along the model axis, 2 ranks" in table and f"along the batch axis, {SIZE // 2} ranks" in table, table


def check_slots_in_shards_of_slices_equal_one_process():
    make = lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.5, use_ema=True)  # noqa: E731
    model, one = compiled(SHARDING, optimizer=make), compiled(None, optimizer=make)
    for each in (model, one):
        each.fit(X, Y, batch_size=10, epochs=2, verbose=0)
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


def check_each_rank_makes_its_slice_of_what_one_process_draws():
    def of_the_program(shape: Any, dtype: Any = None) -> Any:
        return np.arange(np.prod(shape), dtype=dtype)

    def made() -> list[keras.Variable]:
        kernels = ["glorot_uniform", "he_normal", "random_normal", keras.initializers.Constant(0.3), "orthogonal"]
        layers = [keras.layers.Dense(12, kernel_initializer=each, name="dense_wide") for each in kernels]
        layers.append(keras.layers.Dense(12, bias_initializer=of_the_program, name="dense_wide"))
        for each in layers:
            each.build((None, 6))
        return [variable for each in layers for variable in each.variables]

    set_precision("float64")
    in_full = []
    send = laid_out.agreement.broadcast_value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laid_out.agreement, "broadcast_value", lambda *args: in_full.append(args) or send(*args))
        keras.utils.set_random_seed(RANK)  # rank 0's counts
        with STRATEGY.scope():
            variables = made()
    keras.utils.set_random_seed(0)
    cut = gathered_slots.slots_in(variables)
    assert len(cut) == 12 and len(in_full) == 2, in_full  # all at once: orthogonal, of_the_program
    with gathered_slots.gathered(cut):
        for mine, expected in zip(variables, made(), strict=True):
            np.testing.assert_array_equal(mine.numpy(), expected.numpy(), err_msg=mine.path)


@long
def check_a_transformer_in_fit_evaluate_and_predict_equals_one_process():
    def trained(strategy: Any) -> tuple[keras.Model, list[Any]]:
        set_precision("float64")  # of the loss, too
        adam = lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.5)  # noqa: E731
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = compiled(strategy, lambda: transformer(blocks=1), adam, loss, metrics=["accuracy"])
        options = {"batch_size": 7, "verbose": 0}
        history = model.fit(TOKENS, LABELS, epochs=1, validation_data=(TOKENS, LABELS), **options).history
        return model, [*history.values(), model.predict(TOKENS[:9], **options)]

    (model, mine), (one, expected) = trained(STRATEGY), trained(None)
    for values, others in zip(mine, expected, strict=True):
        np.testing.assert_allclose(values, others, rtol=0, atol=1e-12)
    assert_equal(model, one)
    table = STRATEGY.explain(model)
    of_training = table[: table.index("test_step")]
    along_model = of_training[: of_training.index("along the batch axis")]
    assert "along the model axis, 2 ranks" in along_model and "gather" not in along_model, table
    cut = gathered_slots.slots_of(model)
    assert len(cut) == 10 * 3, cut  # weights, and two slots of each
    assert all(np.prod(each.chunk.shape) * 2 == np.prod(each.shape) for each in cut)


@long
def check_ranks_write_their_slices_of_a_checkpoint_and_read_them():
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}

    def fit(strategy: Any, epochs: int, *callbacks: Any) -> keras.Model:
        model = compiled(strategy)
        model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **options)
        return model

    with shared_folder() as path, gathers() as gathered:
        for epochs in (1, 2):
            save = keras_ddl.callbacks.Checkpoint(path, resume=True, save_best=False, sample=X[:3])
            model = fit(STRATEGY, epochs, save)
        assert gathered == []
        one = fit(None, 2)
        assert_equal(model, one)
        saved = ckpt.latest(path)
        assert_saved_in_slices(saved, one)
        with np.load(saved.path / "golden.npz") as golden:
            (answers,) = (golden[name] for name in golden.files if name.startswith("answers:"))
        np.testing.assert_allclose(answers, one.predict(X[:3], verbose=0), rtol=0, atol=1e-12)


@long
def check_a_rank_that_cannot_write_is_named_and_a_directory_that_is_not_shared_gets_all():
    model, one = compiled(STRATEGY), compiled(None)
    options = {"batch_size": 10, "verbose": 0, "shuffle": False}
    with shared_folder() as path, pytest.MonkeyPatch.context() as patched, gathers() as gathered:
        save = keras_ddl.callbacks.Checkpoint(path, save_best=False, export_base=False)
        model.fit(X, Y, epochs=1, callbacks=[save], **options)

        def fail(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        if RANK == 1:
            patched.setattr(Snapshot, "write_bundles", fail)
        with pytest.raises(CheckpointError, match="rank 1: .*No space left" if RANK != 1 else "No space left"):
            model.fit(X, Y, epochs=2, initial_epoch=1, callbacks=[save], **options)
        keras_ddl.barrier()
        assert [entry.name for entry in path.iterdir()] == ["ckpt-00000005"]
        assert gathered == []
        patched.undo()
        if RANK == 1:
            patched.setattr(os, "access", lambda *_: False)
        here = {"save_best": False, "export_base": False, "resume": True}
        apart = keras_ddl.callbacks.Checkpoint(path / "apart", **here)
        with (
            pytest.warns(UserWarning, match=r"rank\(s\) 1 of 2 do not find") if RANK == 0 else contextlib.nullcontext()
        ):
            model.fit(X, Y, epochs=3, initial_epoch=2, callbacks=[apart], **options)
        assert gathered != []
        again = compiled(STRATEGY)
        again.fit(X, Y, epochs=3, callbacks=[keras_ddl.callbacks.Checkpoint(path / "apart", **here)], **options)
        one.fit(X, Y, epochs=3, **options)
        assert_equal(again, one)


@contextlib.contextmanager
def gathers() -> Iterator[list[str]]:
    """Yields the names of variables that were gathered on this rank meanwhile."""
    names: list[str] = []
    original = gathered_slots._gather

    def gather(slot: Any) -> Any:
        names.append(slot.name)
        return original(slot)

    gathered_slots._gather = gather
    try:
        yield names
    finally:
        gathered_slots._gather = original


@long
def check_a_model_is_saved_complete_and_loaded():
    model, one = compiled(STRATEGY), compiled(None)
    for each in (model, one):
        each.fit(X, Y, batch_size=10, verbose=0)
    with shared_folder() as folder:
        path = f"{folder}/model.keras"
        with STRATEGY.whole_model(model):
            model.save(path)
        keras_ddl.barrier()
        loaded = keras.models.load_model(path)
        for mine, expected in zip(loaded.get_weights(), one.get_weights(), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-12)
        again = compiled(STRATEGY)
        again.load_weights(path)
        np.testing.assert_allclose(
            again.evaluate(X, Y, batch_size=10, verbose=0), one.evaluate(X, Y, batch_size=10, verbose=0), atol=1e-12
        )


@long
def check_a_step_of_the_program_equals_one_process():
    def step_of(model: keras.Model) -> Any:
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            trained = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, [each.value for each in trained]), trained)
            return loss

        return step

    model, one = compiled(STRATEGY), compiled(None)
    cut, plain = STRATEGY.function(step_of(model)), tf.function(step_of(one))
    for begin in (0, 11, 22):
        batch = X[begin : begin + 11], Y[begin : begin + 11]
        np.testing.assert_allclose(cut(*batch), plain(*batch), rtol=0, atol=1e-12)
    assert_equal(model, one)
    assert "along the model axis" in cut.explain()


@long
def check_sequences_in_parts_equal_one_process():
    mesh = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
    in_parts = keras_ddl.Strategy(layout_map=mesh, data_layout=("batch", "model"))
    set_precision("float64")  # of the loss, too
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


def check_a_slice_that_differs_from_its_copies_is_reported():
    model = compiled(STRATEGY)
    kernel = model.get_layer("dense_wide").kernel

    def change(*_: Any) -> None:
        if RANK == SIZE - 1:
            kernel.value.chunk.assign_add(tf.one_hot([0] * 6, 4, 1e-9, 0.0, dtype=tf.float64))

    with pytest.raises(DriftError, match=rf"dense_wide.*kernel on rank {SIZE - 1} differs from rank 1; .*6 of 24"):
        model.fit(X, Y, batch_size=10, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=change)])


def check_what_is_cut_is_refused_outside_of_steps():
    model = compiled(STRATEGY)
    assert any(isinstance(each.value, LaidOutVariable) for each in model.variables)
    refused = [
        model.get_weights,
        lambda: model(X[:3]),
        lambda: STRATEGY.run(lambda: 1),
        lambda: model.predict_on_batch(X[:3]),
    ]
    for each in refused:
        with pytest.raises(ConfigError, match="layout_map"):
            each()
    with pytest.raises(tf.errors.InvalidArgumentError, match="a read in a graph"):
        tf.function(lambda: tf.add_n([tf.nn.l2_loss(each.value) for each in model.variables]))()
    eager = compiled(STRATEGY, run_eagerly=True)
    with pytest.raises(ConfigError, match="run_eagerly=True"):
        eager.fit(X, Y, batch_size=10, verbose=0)


def check_a_variable_that_was_made_outside_of_the_scope_is_refused():
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


def check_keys_that_match_nothing_are_told():
    other = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE // 2, 2)))
    other["nothing"] = ("model",)
    strategy = keras_ddl.Strategy(layout_map=other)
    set_precision("float64")
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="match none"):
        model.fit(X, Y, batch_size=10, verbose=0)


@long
def check_callbacks_of_keras_save_what_one_process_would_have():
    model, one = compiled(STRATEGY), compiled(None)
    with shared_folder() as folder:
        for each, name in ((model, "mesh"), (one, f"one_{RANK}")):
            path = f"{folder}/{name}.keras"
            save = keras.callbacks.ModelCheckpoint(path, verbose=0)
            backup = keras.callbacks.BackupAndRestore(f"{folder}/backup_{name}")
            each.fit(X, Y, batch_size=10, epochs=2, verbose=0, shuffle=False, callbacks=[save, backup])
        keras_ddl.barrier()
        loaded, expected = (keras.models.load_model(f"{folder}/{each}.keras") for each in ("mesh", f"one_{RANK}"))
    for mine, theirs in zip(loaded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
    for mine, theirs in zip(loaded.optimizer.variables, expected.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=0, atol=1e-12)


@long
def check_data_whose_length_is_not_known_ends_as_in_one_process():
    def dataset() -> Any:
        rows = tf.data.Dataset.from_generator(
            lambda: zip(X, Y), output_signature=(tf.TensorSpec(6, tf.float64), tf.TensorSpec(2, tf.float64))
        )
        return rows.batch(10)

    make = lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.5)  # noqa: E731  (which decays before it has a batch)
    model, one = compiled(STRATEGY, optimizer=make), compiled(None, optimizer=make)
    for each in (model, one):
        each.fit(dataset(), epochs=2, verbose=0)
    assert_equal(model, one)


@long
def check_train_on_batch_and_accumulated_gradients_equal_one_process():
    make = lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2, clipnorm=0.3, use_ema=True)  # noqa: E731
    model, one = compiled(STRATEGY, optimizer=make), compiled(None, optimizer=make)
    for each in (model, one):
        each.fit(X, Y, batch_size=10, epochs=2, verbose=0)
    assert_equal(model, one)
    model, one = compiled(STRATEGY), compiled(None)
    for _ in range(2):
        one.train_on_batch(X[:40], Y[:40])
        model.train_on_batch(X[:40][RANK::SIZE], Y[:40][RANK::SIZE])
    assert_equal(model, one)
    assert everyone(1) == [1] * SIZE


CHOOSES = keras_ddl.Strategy(model_parallel=2, drift_check_percent=100)


def shown_layout(output: str) -> keras.distribution.LayoutMap:
    """Returns the layout that rank 0 has printed, made as the printed lines make it."""
    lines = [
        each
        for each in keras_ddl.broadcast_object(output, name="test/shown").splitlines()
        if re.match(r"(mesh|layout_map)\b", each)
    ]
    names: dict[str, Any] = {"keras": keras, "keras_ddl": keras_ddl}
    exec("\n".join(lines), names)
    return names["layout_map"]


def cut_axes(model: keras.Model) -> dict[str, int]:
    cut = [each for each in model.variables if isinstance(each.value, LaidOutVariable) and not each.value.is_complete]
    return {each.path: each.value.axis for each in cut}


def check_a_chosen_layout_equals_one_process_and_is_shown_as_a_script_makes_it():
    model, one, shown = compiled(CHOOSES), compiled(None), io.StringIO()
    with CHOOSES.whole_model(model):  # until a layout is chosen, every rank has all
        before = model.get_weights()
    for mine, expected in zip(before, one.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, expected)
    np.testing.assert_allclose(model(X[:3]), one(X[:3]), rtol=0, atol=1e-12)
    model.set_weights(before)
    with contextlib.redirect_stdout(shown):
        for each in (model, one):
            each.fit(X, Y, batch_size=10, epochs=2, verbose=0)
    assert_equal(model, one)
    np.testing.assert_allclose(
        model.evaluate(X, Y, batch_size=10, verbose=0), one.evaluate(X, Y, batch_size=10, verbose=0), atol=1e-12
    )
    axes = cut_axes(model)
    assert axes == {"dense_wide/kernel": 1, "dense_wide/bias": 0, "dense_narrow/kernel": 0}, axes
    assert sum(not each.is_complete for each in gathered_slots.slots_of(model)) == 3 * 3  # and two slots of each
    layout = Layout(shown_layout(shown.getvalue()), SIZE, RANK)
    assert {each.path: layout.axis_of(each.path, each.shape) for each in model.weights} == {
        each.path: axes.get(each.path) for each in model.weights
    }


@long
def check_a_layout_is_chosen_for_a_transformer_that_is_evaluated_before_it_is_trained():
    adam = lambda: keras.optimizers.AdamW(1e-2, global_clipnorm=0.5)  # noqa: E731
    model, one = (
        compiled(
            each,
            lambda: transformer(blocks=1),
            adam,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        for each in (CHOOSES, None)
    )
    with CHOOSES.scope():
        model.optimizer.build(model.trainable_variables)
    for each in (model, one):
        each.evaluate(TOKENS, LABELS, batch_size=7, verbose=0)
        each.fit(TOKENS, LABELS, batch_size=7, verbose=0)
    assert_equal(model, one)
    axes = cut_axes(model)
    for name, axis in (("query", 1), ("key", 1), ("value", 1), ("attention_output", 0)):
        assert axes[f"attention0/{name}/kernel"] == axis, axes
    assert (axes["up0/kernel"], axes["down0/kernel"]) == (1, 0), axes
    table = CHOOSES.explain(model)
    along_model = table[table.index("train_step") :].partition("along the batch axis")[0]
    assert "gather" not in along_model, along_model


def check_a_model_with_nothing_to_cut_is_trained_replicated_with_a_warning():
    make = lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])  # noqa: E731
    model, one = compiled(CHOOSES, lambda: make()), compiled(None, make)
    x, y = X[:, :5], Y[:, :1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (model, one):
            each.fit(x, y, batch_size=10, verbose=0)
    told = [str(each.message) for each in caught if "is worth cutting" in str(each.message)]
    assert len(told) == (RANK == 0)
    assert_equal(model, one)
