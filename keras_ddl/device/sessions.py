"""Sessions of tf.compat.v1 with this rank's device and share of the cores."""

from __future__ import annotations

import functools
from typing import Any

from keras_ddl.compat import replacing
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


def _configured(original: Any, session: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
    # Without a config a session uses TensorFlow's settings, which already are this rank's.
    original(session, target, graph, config if config is None else session_config(config))
