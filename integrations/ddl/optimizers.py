"""Makes optimizers of Keras and of tf.compat.v1.train average over ranks, outside of any strategy."""

from __future__ import annotations

from typing import Any

import keras

from keras_ddl.compat import optimizers, replacing
from keras_ddl.compat.context import Setting
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl import job, reduction, start
from keras_ddl.gradients.graph_optimizers import Pairs, reduce_within

_applying = Setting("applying", False)


def install() -> None:
    """Changes all optimizers. Once per process."""
    kinds = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    replacing.replace([(kind, "apply", _apply) for kind in kinds])
    reduce_within(tf.compat.v1.train.Optimizer, _averaged, _averaged)


def _apply(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    # An inner optimizer gets gradients that the outer one has already reduced. The outer one must see reduced
    # gradients, so that all ranks agree whether they are finite.
    if _applying.get() or not job.is_training_together():
        return original(optimizer, grads, trainable_variables)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    trained = trainable_variables or optimizers.trained_variables(optimizer) or []
    start.settle([*trained, *(optimizer.variables if optimizer.built else [])])
    with _applying(True):
        return original(optimizer, reduction.averaged(list(grads)), trainable_variables)


def _averaged(pairs: Pairs) -> Pairs:
    if not job.is_training_together():
        return pairs
    start.settle(variable for _, variable in pairs)
    gradients = reduction.averaged([gradient for gradient, _ in pairs])
    return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs)]
