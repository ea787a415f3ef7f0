"""Data, models, pairs of models, and comparisons between ranks for the check programs of the Strategy."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_ddl
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.shards import gathered_slots

# The one-process models are made outside the scope on purpose.
warnings.filterwarnings("ignore", message=".*was made outside the scope.*")

keras.utils.set_random_seed(1)
STRATEGY = keras_ddl.Strategy()
RANK, SIZE = STRATEGY.rank, STRATEGY.size
LAST = SIZE - 1
RNG = np.random.default_rng(0)
X = RNG.normal(size=(43, 6))
Y = RNG.normal(size=(43, 2))
WEIGHTS = RNG.uniform(0.1, 2.0, size=43)
FEW = X[:40].astype("float32"), Y[:40].astype("float32")
LABELS = RNG.integers(0, 3, size=43)


def set_precision(dtype: str) -> None:
    keras.backend.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


def dense_model() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden), name="dense_model")


def small_model(outputs: int = 2) -> keras.Model:
    hidden = keras.layers.Dense(5, activation="tanh")
    return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(outputs)])


def compiled(
    strategy: Any, make: Any = dense_model, optimizer: Any = None, loss: Any = "mse", **more: Any
) -> keras.Model:
    """Returns a float64 model with fixed initial weights; `optimizer` is a factory. strategy=None: one process."""
    set_precision("float64")
    keras.utils.set_random_seed(11)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
        model.compile(optimizer() if optimizer else keras.optimizers.Adam(1e-2), loss, jit_compile=False, **more)
    return model


def fitted(strategy: Any, *args: Any, epochs: int = 2, callbacks: Iterable[Any] = (), **options: Any) -> keras.Model:
    model = compiled(strategy, *args, **options)
    model.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def state(model: keras.Model) -> list[np.ndarray]:
    return [each.numpy() for each in [*model.variables, *model.optimizer.variables]]


def linear_model(**compiled: Any) -> keras.Model:
    set_precision("float32")
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", **compiled)
    return model


def everyone(value: Any) -> list[Any]:
    return keras_ddl.all_gather_object(value, name="test/everyone")


def of_one_process(compute: Callable[[], Any]) -> Any:
    """Returns on all ranks what rank 0 computes alone, because test machines have fewer cores than ranks."""
    return keras_ddl.broadcast_object(compute() if RANK == 0 else None, name="test/of_one_process")


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yields one folder for all ranks; rank 0 deletes it when all are done."""
    folder = keras_ddl.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, name="test/folder")
    yield Path(folder)
    keras_ddl.barrier(name="test/folder_done")
    if RANK == 0:
        shutil.rmtree(folder)


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextlib.contextmanager
def gathers() -> Iterator[list[str]]:
    """Yields a list that collects the names of variables gathered on this rank."""
    names: list[str] = []
    original = gathered_slots._gather

    def gather(slot: Any, *args: Any) -> Any:
        names.append(slot.name)
        return original(slot, *args)

    gathered_slots._gather = gather
    try:
        yield names
    finally:
        gathered_slots._gather = original


def check_equal_on_all_ranks(model: keras.Model, history: dict[str, Any] | None = None) -> None:
    """Checks that weights, optimizer state and history are bitwise equal on all ranks."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    # Compare by position: Keras numbers names per process, and rank 0 has made more models.
    state = {i: v.numpy().tobytes() for i, v in enumerate(variables)}
    for rank, theirs in enumerate(keras_ddl.all_gather_object((state, repr(history)), name="test/state")):
        assert theirs[1] == repr(history), f"history of rank {rank}: {theirs[1]}, here {history}"
        differing = [variables[i].path for i in state if theirs[0].get(i) != state[i]]
        assert not differing, f"variables differ between rank {rank} and {RANK}: {differing}"


def pair() -> list[keras.Model]:
    """Returns a one-process model and a model under the Strategy, in float64 with the same weights."""
    sgd = lambda: keras.optimizers.SGD(0.05)  # noqa: E731
    return [compiled(strategy, optimizer=sgd, metrics=["mae"]) for strategy in (None, STRATEGY)]


def assert_close(mine, expected, tolerance=1e-12):
    """Compares two lists of arrays; tolerance=0 means bit by bit."""
    for one, other in zip(mine, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def assert_same_weights(alone, shared, tolerance=1e-14):
    for one, mine in zip(alone.get_weights(), shared.get_weights()):
        np.testing.assert_allclose(mine, one, rtol=0, atol=tolerance)
    check_equal_on_all_ranks(shared)


def rows_of_ranks(count):
    """Returns row slices of an uneven split: rank 0 has more than half."""
    ends = [0, *np.linspace(count // 2 + 1, count, SIZE).astype(int)]
    return [slice(ends[r], ends[r + 1]) for r in range(SIZE)]


def raises(error: type[Exception] | tuple[type[Exception], ...], message: str, function: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        function()
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


@contextlib.contextmanager
def recorded_warnings(words: str) -> Iterator[list[str]]:
    """Yields a list that receives, on exit, this rank's warnings that contain `words`."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in caught if words in str(each.message)]


def step_of(model: keras.Model) -> Callable[[Any, Any], Any]:
    """Returns a custom training step for `strategy.function`."""

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        trained = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, [each.value for each in trained]), trained)
        return loss

    return step
