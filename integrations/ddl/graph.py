"""Adapts tf.compat.v1 for unchanged scripts: sessions see the rank's device, optimizers average over ranks."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl import job, reduction, start
from keras_ddl.device import sessions
from keras_ddl.gradients.graph_optimizers import Pairs, reduce_within


def install() -> None:
    """Changes the sessions and the optimizers of tf.compat.v1. Once per process."""
    sessions.install()
    reduce_within(tf.compat.v1.train.Optimizer, _averaged, _averaged)


def _averaged(pairs: Pairs) -> Pairs:
    if not job.is_training_together():
        return pairs
    start.settle(variable for _, variable in pairs)
    gradients = reduction.averaged([gradient for gradient, _ in pairs])
    return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs)]
