"""Sessions of tf.compat.v1 with this rank's device and share of the cores."""

from __future__ import annotations

import functools
from typing import Any

from keras_ddl.compat import replacing
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


@functools.cache
def install() -> None:
    """Makes tf.compat.v1's sessions use the choices of `configure_tensorflow` and `share_cores`, once per process.

    A session's `config` may choose otherwise.
    """
    kinds = (tf.compat.v1.Session, tf.compat.v1.InteractiveSession)
    replacing.replace([(kind, "__init__", _configured) for kind in kinds])


def session_config(config: tf.compat.v1.ConfigProto) -> tf.compat.v1.ConfigProto:
    """Returns `config` with this rank's GPU and its share of the cores, where it leaves them open."""
    result, own = tf.compat.v1.ConfigProto(), tf_compat.eager_config()
    result.CopyFrom(config)
    for options, default in (
        (result.gpu_options, own.gpu_options),
        (result.pluggable_device_options, own.pluggable_device_options),
    ):
        options.visible_device_list = options.visible_device_list or default.visible_device_list
        options.allow_growth = options.allow_growth or default.allow_growth
    result.intra_op_parallelism_threads = config.intra_op_parallelism_threads or own.intra_op_parallelism_threads
    result.inter_op_parallelism_threads = config.inter_op_parallelism_threads or own.inter_op_parallelism_threads
    return result


def _configured(original: Any, session: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
    # Without a config, a session uses the one of eager operations.
    original(session, target, graph, config if config is None else session_config(config))
