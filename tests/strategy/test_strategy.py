"""The Strategy on real ranks: training, data, callbacks, shards, custom loops, and errors."""

import contextlib
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_ddl
from harness.rank_tests import rank_tests, run_ranks

HERE = Path(__file__).parent


def checks(*names: str, folder: Path = HERE) -> list[Path]:
    return [folder / f"{name}_checks.py" for name in names]


# One launch serves all quick checks, because importing TensorFlow and Keras takes longer than most of them. Each
# program has a few quick checks; the others are `long`.
OF_TWO = (
    "trace",  # comes first: it needs the first step of a process
    *("exact", "loop", "random", "batch_loop", "callback", "saving", "outside", "error", "failing"),
    *(
        "plan",
        "data",
        "rank_0_data",
        "row",
        "tf_distribute",
        "one_per_job",
        "state",
        "same_step",
        "step",
        "weight",
        "bar",
    ),
)
CALLBACKS = checks("callbacks", "resume", folder=HERE.parent / "callbacks")
# Every check of these programs is long.
PROGRAMS = ("metric_state", "table")  # as Keras's guides write them
FURTHER = ("metric", "guard", "fine_tuning", *PROGRAMS)
# Programs that may behave differently on more than two ranks.
OF_MORE = (*(name for name in OF_TWO if name not in ("trace", "error", "one_per_job", "weight")), *FURTHER)
# Shards all weights of small models and gathers each weight anew for every use.
IN_SHARDS = {"KERAS_DDL_SHARD_FROM_ELEMENTS": "2", "KERAS_DDL_GATHERED_WEIGHT_BYTES": "1"}

test_of_two = rank_tests([*checks(*OF_TWO), *CALLBACKS], [2], env=IN_SHARDS)
test_further = pytest.mark.long(rank_tests(checks(*FURTHER, "explain", "order"), [2]))
test_of_more = pytest.mark.long(rank_tests(checks(*OF_MORE), [3]))
test_shards = pytest.mark.long(rank_tests(checks("shard", "weight"), [3], env=IN_SHARDS))
test_tables_in_shards = pytest.mark.long(rank_tests(checks("table_shard"), [2, 3], env=IN_SHARDS))
test_callbacks_of_three = pytest.mark.long(rank_tests(CALLBACKS, [3]))
test_without_a_seed = pytest.mark.long(rank_tests(checks("seed"), [2]))
test_of_four = pytest.mark.long(rank_tests(checks("exact", "step", *PROGRAMS), [4]))
test_random_and_variables = pytest.mark.long(rank_tests(checks("random", "variable"), [2, 4]))
test_plans_over_mpi = pytest.mark.long(rank_tests(checks("plan"), [(2, "x:1x2")]))


@pytest.mark.long
@pytest.mark.parallel
def test_strategy_warns_of_an_unknown_keras_and_rejects_an_incomplete_one():
    def make():
        import warnings

        from keras_ddl.compat import keras as keras_compat

        keras_compat.keras.__version__ = "4.0.0"
        import keras_ddl

        build = keras_compat.TFTrainer._maybe_symbolic_build
        del keras_compat.TFTrainer._maybe_symbolic_build
        messages = []
        for _ in range(2):
            try:
                keras_ddl.Strategy()
            except keras_ddl.errors.DependencyError as error:
                messages.append(str(error))
        keras_compat.TFTrainer._maybe_symbolic_build = build
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            keras_ddl.Strategy()
        return messages, [str(w.message) for w in caught]

    refused, warned = run_ranks(make, 1).check().ranks[0].result
    assert len(refused) == 2 and "_maybe_symbolic_build. Received: keras 4.0.0, which does not have it" in refused[0]
    assert any("Received: Keras 4.0.0" in message for message in warned)


def test_strategy_on_one_rank_trains_as_keras_does():
    def run(scope):
        keras.utils.set_random_seed(3)
        with scope:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.3), keras.layers.Dense(2)])
            model.compile("adam", "mse", metrics=["mae"])
        x, y = np.random.rand(20, 4), np.random.rand(20, 2)
        history = model.fit(x, y, batch_size=6, epochs=2, validation_split=0.2, verbose=0).history
        return [w.tobytes() for w in model.get_weights()], history, model.predict(x, verbose=0).tobytes()

    strategy = keras_ddl.Strategy()
    assert run(contextlib.nullcontext()) == run(strategy.scope())
    with strategy.scope():
        explained = strategy.explain(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    assert explained == strategy.function(run).explain() == "1 rank: nothing moves between ranks."


@pytest.mark.long
@pytest.mark.parallel
def test_strategy_reads_a_py_dataset_in_spawned_processes(tmp_path):
    program = tmp_path / "spawned.py"
    program.write_text(
        """
import multiprocessing

import keras
import numpy as np


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = np.arange(8.0 * index, 8.0 * index + 8)[:, None] / 32
        assert multiprocessing.parent_process() is not None or index < 2  # Keras looks at some for their shapes
        return x, 2 * x


if __name__ == "__main__":  # the spawned processes import this file
    import keras_ddl

    multiprocessing.set_start_method("spawn")
    with keras_ddl.Strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(Batches(workers=2, use_multiprocessing=True), epochs=2, verbose=0)
    weights = keras_ddl.all_gather_object([w.tolist() for w in model.get_weights()])
    assert weights[0] == weights[1] and weights[0][0] != [[1.0]], weights
"""
    )
    run_ranks(program, 2).check()
