"""Starts recording when a verified program has imported Keras and keras_ddl's Strategy, before it continues."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from keras_ddl import config
from keras_ddl.packages.after_import import AfterImport
from keras_ddl.verify.recording import Plan


def begin() -> None:
    """Seeds Python's and NumPy's generators, and waits for the imports.

    Does nothing unless KERAS_DDL_VERIFY_DIR is set.
    """
    folder = config.get("VERIFY_DIR")
    if folder is None:
        return
    plan = Plan.read(Path(folder))
    random.seed(plan.seed)
    import numpy as np

    np.random.seed(plan.seed)

    def set_up_keras(keras: Any) -> None:
        if keras.config.backend() != "tensorflow":
            return  # keras_ddl itself refuses it
        if plan.floatx:
            keras.config.set_floatx(plan.floatx)
        from keras_ddl.compat import tensorflow as tf_compat

        # Kept, because the program may have drawn numbers or set seeds.
        states = random.getstate(), np.random.get_state(), tf_compat.global_seed()
        keras.utils.set_random_seed(plan.seed)
        random.setstate(states[0])
        np.random.set_state(states[1])
        if states[2] is not None:
            tf_compat.tf.random.set_seed(states[2])
        if tf_compat.tf.config.list_physical_devices("GPU"):  # the fastest kernels differ from run to run
            tf_compat.tf.config.experimental.enable_op_determinism()

    def follow(strategy: Any) -> None:
        from keras_ddl.verify import recorder

        recorder.begin(Path(folder), plan)

    sys.meta_path.insert(0, AfterImport({"keras": set_up_keras, "keras_ddl.strategy": follow}))
