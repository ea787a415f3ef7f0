"""Imports of the fork server."""

import gc
import logging

from keras_ddl.compat.tensorflow_packages import import_without_keras
from keras_ddl.launch import startup_notes

with startup_notes.hidden():
    import_without_keras()
    from keras_ddl.compat.tensorflow import tf
    from keras_ddl.serving import model_process  # noqa: F401

tf.get_logger().setLevel(logging.ERROR)
gc.freeze()  # keeps the collector from touching these objects, so that their memory stays shared
