"""Every class of keras.metrics gives the result of one process. Run by test_strategy.py.

Each metric is updated with this rank's rows in `strategy.run`, one batch after another, with weights where it accepts
them. Its result outside covers all ranks.
"""

import inspect

import numpy as np

from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, STRATEGY, everyone, keras, rows_of_ranks, set_precision

RNG = np.random.default_rng(5)
ROWS = 24
NUMBERS = RNG.uniform(0.05, 0.95, size=(3, ROWS, 4)), RNG.uniform(0.05, 0.95, size=(3, ROWS, 4))
# TensorFlow's top-k supports float32 only.
CLASSES = RNG.integers(0, 4, size=(3, ROWS)), RNG.dirichlet(np.ones(4), size=(3, ROWS)).astype("float32")
ONE_HOT = np.eye(4)[CLASSES[0]], CLASSES[1]
BINARY = (NUMBERS[0] > 0.5).astype("float64"), NUMBERS[1]
MASKS = RNG.integers(0, 2, size=(3, ROWS, 4)), RNG.integers(0, 2, size=(3, ROWS, 4))
WEIGHTS = RNG.uniform(0.1, 2.0, size=(3, ROWS))

# Constructor arguments and inputs, by class; the defaults are no arguments and NUMBERS.
ARGUMENTS = {
    "BinaryIoU": {"threshold": 0.5},
    "IoU": {"num_classes": 2, "target_class_ids": [1]},
    "MeanIoU": {"num_classes": 2},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0, 4.0]},
    "OneHotIoU": {"num_classes": 4, "target_class_ids": [1, 2]},
    "OneHotMeanIoU": {"num_classes": 4},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
FED = {
    **dict.fromkeys(("IoU", "MeanIoU"), MASKS),
    **dict.fromkeys(
        (
            *("AUC", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU", "FalseNegatives", "FalsePositives"),
            *("FBetaScore", "F1Score", "Hinge", "Precision", "PrecisionAtRecall", "Recall", "RecallAtPrecision"),
            *("SensitivityAtSpecificity", "SpecificityAtSensitivity", "SquaredHinge", "TrueNegatives", "TruePositives"),
        ),
        BINARY,
    ),
    **dict.fromkeys(
        (
            *("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "KLDivergence", "OneHotIoU"),
            *("OneHotMeanIoU", "TopKCategoricalAccuracy"),
        ),
        ONE_HOT,
    ),
    **dict.fromkeys(
        ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy"), CLASSES
    ),
}
ABSTRACT = ("Metric",)


def classes():
    found = {name: one for name, one in vars(keras.metrics).items() if inspect.isclass(one)}
    return {name: one for name, one in found.items() if issubclass(one, keras.metrics.Metric) and name not in ABSTRACT}


def result_of(kind, name, rows, run):
    metric = kind(**ARGUMENTS.get(name, {}))
    reduces = name in ("Mean", "Sum")
    weighted = isinstance(metric, (keras.metrics.Mean, keras.metrics.Sum))
    for y_true, y_pred, weight in zip(*FED.get(name, NUMBERS), WEIGHTS):
        values = (y_pred[rows],) if reduces else (y_true[rows], y_pred[rows])
        weights = {"sample_weight": weight[rows]} if weighted else {}
        run(metric, values, weights)
    return keras.tree.map_structure(np.asarray, metric.result())


def check_every_metric_class():
    set_precision("float64")
    found = classes()
    assert len(found) > 40, sorted(found)
    rows = rows_of_ranks(ROWS)[RANK]

    def on_ranks(metric, values, weights):
        tensors = [tf.constant(each) for each in (*values, *weights.values())]

        def update(*batch):
            metric.update_state(*batch[: len(values)], **dict(zip(weights, batch[len(values) :])))

        STRATEGY.run(update, args=tensors)

    wrong, bits = [], {}
    for number, (name, kind) in enumerate(sorted(found.items())):
        with STRATEGY.scope():
            mine = result_of(kind, name, rows, on_ranks)
        bits[name] = [one.tobytes() for one in keras.tree.flatten(mine)]
        if number % SIZE != RANK:  # another rank computes the one-process result
            continue
        alone = result_of(
            kind, name, slice(None), lambda metric, values, weights: metric.update_state(*values, **weights)
        )
        gap = max(np.abs(one - other).max() for one, other in zip(keras.tree.flatten(mine), keras.tree.flatten(alone)))
        if not gap <= 2e-6:  # many compute in float32
            wrong.append(f"{name}: {mine}, in one process {alone}")
    for theirs in everyone((wrong, bits)):
        assert theirs[1] == bits, [name for name in bits if theirs[1][name] != bits[name]]
        wrong = wrong or theirs[0]
    assert not wrong, f"{len(wrong)} of {len(found)} at {SIZE} ranks: " + "\n".join(wrong)
