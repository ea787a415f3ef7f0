"""Checks of keras_ddl with a pair of versions of Keras and TensorFlow. tools/versions.py runs them in this order.

    python checks.py names FOLDER                                  # prints the names of the checks
    python checks.py alone FOLDER [NAME...]                        # plain Keras: writes the expected values
    keras-ddl run -np 2 python checks.py ranks FOLDER [NAME...]    # the same on ranks, compared with these

Each check is one function, which builds and trains: with plain Keras in one process, under the Strategy on ranks. Its
results must be equal to 1e-12 in float64. Rank 0 adds a line to FOLDER/outcomes.jsonl when a check ends, so that a
check that ends the whole job is known, too. Only the checks import TensorFlow and Keras, because the imports themselves
may fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-12
SHOWN = 400  # characters of an error; the log has all of it

Values = dict[str, Any]  # label -> array


@dataclasses.dataclass(frozen=True)
class Run:
    """The context of a check; in one process without keras_ddl, `rank` and `strategy` are None."""

    folder: Path
    rank: int | None = None
    strategy: Any = None

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Returns the scope in which models are created."""
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()


def rows(seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Returns x: [37, 6] float64 and y: [37] of three classes. In batches of 10, the last one is smaller."""
    random = np.random.default_rng(seed)
    return random.normal(size=(37, 6)), random.integers(0, 3, size=37)


def perceptron() -> Any:
    """Returns a model that needs all rows for the right result, because of statistics and random numbers."""
    from keras import layers, models

    inputs = layers.Input((6,))
    hidden = layers.BatchNormalization()(layers.Dense(8, activation="tanh")(inputs))
    return models.Model(inputs, layers.Dense(3)(layers.Dropout(0.3)(hidden)))


def compiled(model: Any) -> Any:
    import keras

    model.compile(
        keras.optimizers.Adam(1e-2, global_clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def built(run: Run, build: Callable[[], Any] = perceptron) -> Any:
    with run.scope():
        return compiled(build())


def trained(model: Any, x: Any = None, y: Any = None, **arguments: Any) -> dict[str, list[float]]:
    """Fits in order, two epochs by default; returns the history."""
    if x is None:
        x, y = rows()
    return model.fit(x, y, **{"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}).history


def state(model: Any, optimizer: Any = None, history: dict[str, list[float]] | None = None) -> Values:
    """Returns weights, the optimizer's variables and logs."""
    optimizer = optimizer or model.optimizer
    values = {f"weight {i}": v.numpy() for i, v in enumerate(model.variables)}
    values |= {f"optimizer's variable {i}": v.numpy() for i, v in enumerate(optimizer.variables)}
    return values | {f"log {name}": np.asarray(logs) for name, logs in (history or {}).items()}


def check_import(run: Run) -> Values:
    """Imports everything that needs TensorFlow or Keras, and loads the ops."""
    if run.rank is not None:
        import keras_ddl
        from keras_ddl import callbacks, export, horovod, model_state  # noqa: F401
        from keras_ddl.compat import tensorflow as tensorflow_compat

        tensorflow_compat.load_ops()
        assert callable(keras_ddl.Strategy)
    import keras
    import tensorflow as tf

    return {"Keras": np.asarray(keras.__version__), "TensorFlow": np.asarray(tf.__version__)}


def check_strategy(run: Run) -> Values:
    """Creates a Strategy, runs a function on all ranks, and adds up the results."""
    import tensorflow as tf

    if run.strategy is None:
        return {"sum over ranks": 1.0 + 2.0, "replicas": 2}

    @tf.function
    def number() -> Any:
        return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group + 1, tf.float64)

    total = run.strategy.reduce("sum", run.strategy.run(number), axis=None)
    return {"sum over ranks": float(total), "replicas": run.strategy.num_replicas_in_sync}


def check_function(run: Run) -> Values:
    """A custom training loop gives the same with strategy.function as with tf.function."""
    import keras
    import tensorflow as tf

    model = perceptron()
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @(run.strategy.function if run.strategy else tf.function)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits)
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        accuracy.update_state(y, logits)
        return loss

    x, y = rows()
    losses = [step(x[i : i + 10], y[i : i + 10]).numpy() for _ in range(2) for i in range(0, len(x), 10)]
    return state(model, optimizer, {"loss": losses, "accuracy": [accuracy.result().numpy()]})


def check_fit(run: Run) -> Values:
    """model.fit, with validation."""
    model = built(run)
    history = trained(model, validation_data=rows(6))
    return state(model, history=history)


def check_evaluate(run: Run) -> Values:
    """model.evaluate of an untrained model."""
    return built(run).evaluate(*rows(), batch_size=10, verbose=0, return_dict=True)


def check_predict(run: Run) -> Values:
    """model.predict gives the rows of the whole array, on every rank."""
    return {"prediction": built(run).predict(rows()[0], batch_size=10, verbose=0)}


def check_model_checkpoint(run: Run) -> Values:
    """The file of ModelCheckpoint is loaded and trained further."""
    import keras

    path = str(run.folder / ("ranks.keras" if run.strategy else "alone.keras"))
    trained(built(run), epochs=1, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    with run.scope():
        model = keras.models.load_model(path)
    return state(model, history=trained(model, initial_epoch=1))


def check_resume(run: Run) -> Values:
    """Training resumed from a checkpoint of keras_ddl ends like uninterrupted training."""
    if run.strategy is None:
        model = built(run)
        trained(model)
        return state(model)
    from keras_ddl import callbacks

    folder = str(run.folder / "resumed")
    trained(built(run), epochs=1, callbacks=[callbacks.Checkpoint(folder, monitor="loss", mode="min")])
    model = built(run)
    trained(model, callbacks=[callbacks.Checkpoint(folder, monitor="loss", mode="min", resume=True)])
    return state(model)


def check_lstm(run: Run) -> Values:
    """model.fit of a recurrent network."""
    from keras import layers, models

    def recurrent() -> Any:
        return models.Sequential([layers.Input((5, 6)), layers.LSTM(4), layers.Dense(3)])

    x, y = np.random.default_rng(8).normal(size=(37, 5, 6)), rows()[1]
    model = built(run, recurrent)
    return state(model, history=trained(model, x, y))


def check_export(run: Run) -> Values:
    """A checkpoint becomes a SavedModel, which runs in a process without keras_ddl."""
    model, x = built(run), rows()[0]
    if run.strategy is None:
        trained(model, epochs=1)
        return {"answer": model.predict(x, verbose=0)}
    import keras_ddl
    from keras_ddl import callbacks

    folder, asked = str(run.folder / "exported"), run.folder / "asked.npy"
    trained(
        model,
        epochs=1,
        callbacks=[callbacks.Checkpoint(folder, monitor="loss", mode="min"), callbacks.ExportBase(sample=x[:5])],
    )
    answer = None
    if run.rank == 0:
        result = keras_ddl.export.export_saved_model(folder, str(run.folder / "saved_model"))
        np.save(asked, x)
        command = [sys.executable, __file__, "answer", str(result.path), str(asked)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"the SavedModel does not run: {done.stderr.strip().splitlines()[-1]}")
        answer = np.load(asked)
    return {"answer": keras_ddl.broadcast_object(answer, name="checks/answer")}


def answer(saved_model: str, asked: str) -> None:
    """Replaces the rows in the file `asked` with a SavedModel's outputs for them."""
    import tensorflow as tf

    serve = tf.saved_model.load(saved_model).signatures["serving_default"]
    ((name, spec),) = serve.structured_input_signature[1].items()
    ((_, found),) = serve(**{name: tf.constant(np.load(asked), spec.dtype)}).items()
    assert "keras_ddl" not in sys.modules
    np.save(asked, found.numpy())


CHECKS: dict[str, Callable[[Run], Values]] = {
    "import": check_import,
    "strategy": check_strategy,
    "function": check_function,
    "fit": check_fit,
    "evaluate": check_evaluate,
    "predict": check_predict,
    "ModelCheckpoint": check_model_checkpoint,
    "resume": check_resume,
    "LSTM": check_lstm,
    "export": check_export,
}


def differences(found: Values, expected: Values) -> str:
    """Returns how values differ from those of one process, or ""."""
    if sorted(found) != sorted(expected):
        return f"{sorted(found)} instead of {sorted(expected)}"
    wrong = []
    for label, want in expected.items():
        have, want = np.asarray(found[label]), np.asarray(want)
        if have.shape != want.shape or have.dtype.kind != want.dtype.kind:
            wrong.append(f"{label}: {have.dtype}{list(have.shape)} instead of {want.dtype}{list(want.shape)}")
        elif have.dtype.kind not in "iuf":
            wrong += [f"{label}: {have} instead of {want}"] if (have != want).any() else []
        elif not np.allclose(have, want, rtol=0, atol=TOLERANCE):
            wrong.append(f"{label}: off by {np.abs(have - want).max():.1e}")
    return f"{len(wrong)} of {len(expected)} values differ from one process: " + "; ".join(wrong) if wrong else ""


def prepare() -> None:
    import keras

    keras.backend.clear_session()
    keras.backend.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(3)


def alone(folder: Path, names: list[str]) -> None:
    """Writes FOLDER/NAME.npz for each check that plain Keras passes, otherwise FOLDER/NAME.error."""
    for name in names:
        try:
            prepare()
            values = CHECKS[name](Run(folder))
        except Exception as error:
            traceback.print_exc()
            (folder / f"{name}.error").write_text(f"{type(error).__name__}: {error}")
        else:
            np.savez(folder / f"{name}.npz", **values)


def outcome(folder: Path, name: str, rank: int, strategy: Callable[[], Any]) -> str:
    """Runs a check on this rank; returns what is wrong, or "". COLLECTIVE."""
    try:
        failed = folder / f"{name}.error"
        assert not failed.exists(), f"Keras without keras_ddl: {failed.read_text()}"
        with np.load(folder / f"{name}.npz") as file:
            expected = dict(file)
        prepare()
        # Without a Strategy, because importing does not need one.
        run = Run(folder, rank, None if name == "import" else strategy())
        return differences(CHECKS[name](run), expected)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def ranks(folder: Path, names: list[str]) -> None:
    """Runs checks on this rank, one after another. COLLECTIVE."""
    import keras_ddl

    keras_ddl.init()
    rank = keras_ddl.rank()

    for name in names:
        wrong = outcome(folder, name, rank, lambda: keras_ddl.Strategy())
        found = keras_ddl.all_gather_object(wrong, name=f"checks/{name}")
        wrong = next((f"rank {which}: {each}" for which, each in enumerate(found) if each), "").removeprefix("rank 0: ")
        if rank == 0:
            with (folder / "outcomes.jsonl").open("a") as file:
                file.write(json.dumps({"check": name, "wrong": " ".join(wrong.split())[:SHOWN]}) + "\n")
            print(f"{name}: {wrong or 'ok'}", flush=True)


def main() -> None:
    what, folder, *names = sys.argv[1:]
    if what == "names":
        print(*CHECKS)
    elif what == "answer":
        answer(folder, *names)
    else:
        {"alone": alone, "ranks": ranks}[what](Path(folder), names or list(CHECKS))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
