"""`Strategy.explain`: what steps of fit, evaluate and predict move. Run by test_strategy.py."""

import re
import tempfile
from pathlib import Path

import keras_ddl
from harness.rank_program import skip
from keras_ddl import parts
from keras_ddl.compat.tensorflow import tf
from strategy.common import FEW, RANK, STRATEGY, dense_model, keras, linear_model, set_precision

ERROR = keras_ddl.errors.ConfigError


def collectives_of(table):
    return int(re.search(r"([\d,]+) collectives per step", table)[1].replace(",", ""))


def check_explain_has_a_table_for_each_step_of_a_model():
    model = linear_model()
    model.fit(*FEW, batch_size=8, epochs=1, verbose=0)
    assert STRATEGY.explain(model).count(", one step:") == 1
    model.predict(FEW[0], batch_size=8, verbose=0)
    model.evaluate(*FEW, batch_size=8, verbose=0)
    text = STRATEGY.explain(model)
    names = [f"Sequential.{each}_step, one step:" for each in ("train", "predict", "test")]
    assert [each for each in text.splitlines() if each.endswith("one step:")] == names, text
    train, predict, test = text.split("\n\n")
    assert "sum" in train and "is a result" in predict and "gather" in predict, text
    ends = "when a rank is lost: the job ends. Started by `keras-ddl run --min-np M`, the others make this step again"
    assert text.count(ends) == 3, text
    # Loss and metric in one sum; the kernel and bias with them.
    assert (collectives_of(train), collectives_of(test)) == (2, 2), text


class Told(keras.Model):
    """A step with functions of the host, of numbers that are gathered and of one that is summed."""

    def __init__(self):
        super().__init__()
        self.inner = dense_model()

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        logs = super().train_step(data)
        x, _ = data
        tf.print("rows", tf.shape(x)[0], output_stream="file:///dev/null")
        extreme = tf.numpy_function(lambda a: a.max(), [tf.sort(x, 0)], x.dtype)
        return {**logs, "extreme": tf.reshape(extreme, [])}


def check_explain_counts_the_collectives_that_run():
    if parts.is_missing("timeline"):
        skip("counts by the part timeline")
    from keras_ddl import timeline

    set_precision("float32")
    with STRATEGY.scope():
        model = Told()
        model.compile("sgd", "mse", metrics=["mae"])
    steps = 4
    data = tf.data.Dataset.from_tensor_slices(FEW).batch(8, drop_remainder=True).take(steps)
    model.fit(data, epochs=1, verbose=0)
    table = STRATEGY.explain(model)
    assert "explain_checks.py" in table and "PyFunc is called by rank 0 alone" in table, table
    with tempfile.TemporaryDirectory() as folder:
        path = timeline.start(Path(folder, f"fit_{RANK}.json"))
        try:
            model.fit(data, epochs=1, verbose=0)
        finally:
            timeline.stop()
        names = [each.name for each in timeline.collectives(path)]
    of_steps = [each for each in names if "/train_step/" in each or each.split("/")[-1] in ("rows", "needed_rows")]
    assert "then a commit of 4 bytes" in table, table
    assert len(of_steps) == steps * (collectives_of(table) + 1), (sorted(set(names)), table)


def check_explain_says_why_a_step_ends_when_a_rank_is_lost():
    @STRATEGY.function
    def drawn(x):
        return x + tf.random.normal([2], seed=1)

    @STRATEGY.function
    def read(iterator):
        return next(iterator) * 2

    @STRATEGY.function
    def inserts(x):
        table.insert(x, x)
        return x

    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    of_ranks = STRATEGY.function(lambda x: tf.reduce_sum(x), batches="rank")
    dataset = tf.data.Dataset.from_tensor_slices(FEW[0]).batch(4)
    calls = (drawn, tf.ones([2])), (read, iter(dataset)), (inserts, tf.range(4, dtype=tf.int64)), (of_ranks, FEW[0])
    for step, argument in calls:
        step(argument)
    endings = [step.explain().splitlines()[-1] for step, _ in calls]
    assert all(each.startswith("when a rank is lost: the job ends. A step is made again where") for each in endings), (
        endings
    )
    kinds = (
        "RandomStandardNormal (",
        "IteratorGetNext (",
        "LookupTableInsertV2 (",
        "batches='rank', rows of each rank's own",
    )
    for ending, kind in zip(endings, kinds):
        assert f"Received: {kind}" in ending and ("explain_checks.py:" in ending) == ("(" in kind), ending
