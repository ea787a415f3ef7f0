"""`Strategy.explain` shows what steps of fit, evaluate and predict send. Run by test_strategy.py."""

import re

from keras_ddl.compat.tensorflow import tf
from strategy.common import FEW, STRATEGY, linear_model


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
    ends = (
        "when a rank is lost: the job ends. If `keras-ddl run -np MIN:MAX` starts it, the other ranks repeat this step"
    )
    assert text.count(ends) == 3, text
    # One sum carries the loss and the metric, and in training also the gradients.
    assert (collectives_of(train), collectives_of(test)) == (2, 2), text


def check_explain_says_why_a_lost_rank_ends_the_job():
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
    assert all(
        each.startswith("when a rank is lost: the job ends. A step can be repeated after a rank is lost only if")
        for each in endings
    ), endings
    kinds = (
        "RandomStandardNormal (",
        "IteratorGetNext (",
        "LookupTableInsertV2 (",
        "batches='rank', with each rank's own rows",
    )
    for ending, kind in zip(endings, kinds):
        assert f"Received: {kind}" in ending and ("explain_checks.py:" in ending) == ("(" in kind), ending
