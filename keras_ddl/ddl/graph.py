"""tf.compat.v1 scripts as they are: sessions that see the rank's device, optimizers that average over ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl import job, reduction, start


def install() -> None:
    """Changes the sessions and the optimizers of tf.compat.v1. Once per process."""
    for session in (tf.compat.v1.Session, tf.compat.v1.InteractiveSession):
        _see_own_device(session)
    _average(tf.compat.v1.train.Optimizer)


def session_config(config: tf.compat.v1.ConfigProto) -> tf.compat.v1.ConfigProto:
    """Returns `config` with this rank's GPU and its share of the cores, where it says nothing of them."""
    changed = tf.compat.v1.ConfigProto()
    changed.CopyFrom(config)
    gpus = tf.config.get_visible_devices("GPU")
    if gpus and not changed.gpu_options.visible_device_list:
        changed.gpu_options.visible_device_list = ",".join(gpu.name.rpartition(":")[2] for gpu in gpus)
    threading = tf.config.threading
    if not changed.intra_op_parallelism_threads:
        changed.intra_op_parallelism_threads = threading.get_intra_op_parallelism_threads()
    if not changed.inter_op_parallelism_threads:
        changed.inter_op_parallelism_threads = threading.get_inter_op_parallelism_threads()
    return changed


def _see_own_device(session: Any) -> None:
    original = session.__init__

    @functools.wraps(original)
    def __init__(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        # Without a config a session takes TensorFlow's own settings, which are the rank's already.
        original(self, target, graph, config if config is None else session_config(config))

    session.__init__ = __init__


def _average(optimizer: Any) -> None:
    compute, apply = optimizer.compute_gradients, optimizer.apply_gradients

    @functools.wraps(compute)
    def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        return _averaged(compute(self, *args, **kwargs))

    @functools.wraps(apply)
    def apply_gradients(self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if job.is_training_together():
            start.settle(variable for _, variable in pairs)
        return apply(self, _averaged(pairs), *args, **kwargs)

    optimizer.compute_gradients, optimizer.apply_gradients = compute_gradients, apply_gradients


def _averaged(grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    pairs = list(grads_and_vars)
    if not job.is_training_together():
        return pairs
    gradients = reduction.averaged([gradient for gradient, _ in pairs])
    return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs)]
