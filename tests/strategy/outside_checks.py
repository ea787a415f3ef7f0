"""What one rank changes outside of a step: where the next call begins, all have rank 0's. Run by test_strategy.py."""

import contextlib
import warnings

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.errors import DriftError
from strategy.common import (
    LAST,
    RANK,
    SIZE,
    STRATEGY,
    X,
    Y,
    check_equal_on_all_ranks,
    everyone,
    keras,
    of_one_process,
    raises,
    set_precision,
    shared_folder,
)


def compiled(scope, loss="mse", dropout=0.0):
    set_precision("float32")
    keras.utils.set_random_seed(5)
    with scope:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(2),
            ],
            name="net",
        )
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae"])
    return model


def changed(model, by=0.5):
    model.set_weights([(each * by + by).astype(each.dtype) for each in model.get_weights()])


@contextlib.contextmanager
def warned(*words):
    """Rank 0 warns so often, in these words, and nobody else does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(each.message) for each in caught if "outside of steps, too" in str(each.message)]
    expected = words if RANK == 0 else ()
    assert len(texts) == len(expected) and all(word in text for word, text in zip(expected, texts)), texts


def options(**more):
    return {"batch_size": 9, "verbose": 0, **more}


CALLS = {
    "evaluate": lambda model: model.evaluate(X, Y, **options()),
    "predict": lambda model: model.predict(X, **options()),
    "fit": lambda model: model.fit(X, Y, **options(shuffle=False, validation_data=(X, Y))).history["val_loss"],
}


def check_what_rank_0_changes_alone_counts_on_all_ranks():
    alone = compiled(contextlib.nullcontext())
    for name, call in CALLS.items():
        shared = compiled(STRATEGY.scope())
        alone.set_weights(shared.get_weights())
        for first in (True, False):  # in the first call the step is traced
            for model in (alone, shared):
                if RANK == 0:
                    changed(model)
            with warned(f"where {name} begins: other values of net/dense/kernel"):
                mine = call(shared)
            expected = of_one_process(lambda: call(alone))  # noqa: B023
            np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6, err_msg=f"{name} {first}")
            check_equal_on_all_ranks(shared)
            with warned():
                CALLS["evaluate"](shared)


def check_nothing_is_said_where_all_ranks_do_the_same():
    model = compiled(STRATEGY.scope(), dropout=0.3)
    with warned():
        for _ in range(2):
            for call in CALLS.values():
                call(model)
            changed(model)
    check_equal_on_all_ranks(model)


def check_what_a_callback_of_rank_0_restores_when_fit_ends_counts_on_all_ranks():
    def stopping():
        return keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)

    alone, shared = compiled(contextlib.nullcontext()), compiled(STRATEGY.scope())
    alone.set_weights([keras_ddl.broadcast_object(each) for each in shared.get_weights()])
    with warned("where fit has ended: other values of net/dense/kernel"):
        shared.fit(X, Y, **options(epochs=5, shuffle=False, callbacks=[stopping()] if RANK == 0 else []))
    check_equal_on_all_ranks(shared)
    alone.fit(X, Y, **options(epochs=5, shuffle=False, callbacks=[stopping()]))
    for mine, one in zip(shared.get_weights(), of_one_process(alone.get_weights)):
        np.testing.assert_allclose(mine, one, rtol=0, atol=1e-4)


def check_what_a_step_uses_besides_the_model_is_rank_0s_too():
    teacher = compiled(contextlib.nullcontext())
    shared = compiled(STRATEGY.scope(), loss=lambda y, p: keras.ops.square(p - teacher.layers[-1].bias))
    assert np.isfinite(CALLS["evaluate"](shared)).all()
    if RANK == 0:
        teacher.layers[-1].bias.assign([3.0, 4.0])
    with warned("where evaluate begins: other values of"):
        losses = everyone(CALLS["evaluate"](shared))
    assert losses == [losses[0]] * SIZE
    np.testing.assert_array_equal(teacher.layers[-1].bias, [3.0, 4.0])


def check_within_fit_an_evaluation_of_unlike_weights_is_a_drift_error():
    class Swap(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            before = self.model.get_weights()
            if RANK == LAST:
                changed(self.model)
            self.model.evaluate(X, Y, **options())
            self.model.set_weights(before)

    model = compiled(STRATEGY.scope())
    raises(DriftError, "net/dense/kernel on rank", lambda: model.fit(X, Y, **options(callbacks=[Swap()])))

    class AtValidation(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            if RANK == 0:
                changed(self.model)

    fits = options(validation_data=(X, Y), callbacks=[AtValidation()])
    raises(DriftError, "net/dense/kernel on rank", lambda: model.fit(X, Y, **fits))


@long
def check_what_is_saved_is_rank_0s():
    model = compiled(STRATEGY.scope())
    saves = {
        "m.keras": lambda path: model.save(path),
        "m.weights.h5": lambda path: model.save_weights(path),
        "exported": lambda path: model.export(path, verbose=False),
    }
    with shared_folder() as folder:
        for first in range(2):
            for name, save in saves.items():
                CALLS["evaluate"](model)
                if RANK == 0:
                    changed(model)
                path = folder / f"{first}{name}"
                for turn in range(SIZE):
                    keras_ddl.barrier(name="test/turn")
                    if (turn + first) % SIZE == RANK:
                        save(path)
                keras_ddl.barrier(name="test/saved")
                expected = keras_ddl.broadcast_object(model(X[:4]).numpy())
                if name == "m.keras":
                    found = keras.models.load_model(path)(X[:4])
                elif name == "exported":
                    found = keras.layers.TFSMLayer(path, "serve")(X[:4].astype("float32"))
                else:
                    other = compiled(contextlib.nullcontext())
                    other.load_weights(path)
                    found = other(X[:4])
                np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=f"{name} {first}")
