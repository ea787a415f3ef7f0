"""The table of what a Strategy replaces in Keras: how fit reads, calls back and saves. None of it is mathematics.

They are installed when the first Strategy is made. Each asks whether the model, optimizer or context at hand belongs to
a keras_ddl.Strategy and otherwise does what Keras does. A version of Keras they were not written for is a warning, and
a patch point it does not have is named in one.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from keras_ddl.communicator import stack_position
from keras_ddl.compat.keras import (
    TESTED,
    TFVariable,
    Trainer,
    io_utils,
    keras,
    legacy_h5_format,
    saving_lib,
    tf_trainer,
)
from keras_ddl.strategy.keras_patches import callbacks, reading, saving, trainer, variable

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Installs the patches, once per process."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
    if not keras.__version__.startswith(TESTED):
        stack_position.warn(
            f"keras_ddl was tested with Keras {', '.join(TESTED)}* and changes parts of Keras that are not public. "
            f"Received: Keras {keras.__version__}. Compare a short run with one on a single rank, or install a tested "
            "version."
        )
    for owner, name, make in _table():
        original = getattr(owner, name, None)
        if original is None:
            where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
            stack_position.warn(
                f"keras_ddl patches {where}.{name}, which Keras {keras.__version__} does not have: what "
                f"keras_ddl.{make.__module__.rpartition('.')[2]}.{make.__name__} promises will not hold. Install Keras "
                f"{TESTED[-1]}*."
            )
            continue
        replacement = make(original)
        is_function = callable(original) and not isinstance(original, type)
        setattr(owner, name, functools.wraps(original)(replacement) if is_function else replacement)
    tf_trainer.TensorFlowTrainer.stop_training = trainer.STOP_TRAINING


def _table() -> list[tuple[Any, str, Any]]:
    """Returns (owner, attribute, function from the original to its replacement) for every patch."""
    tensorflow_trainer = tf_trainer.TensorFlowTrainer
    return [
        (Trainer, "compile", trainer.compile_model),
        (tensorflow_trainer, "fit", trainer.fit),
        (tensorflow_trainer, "evaluate", trainer.evaluate_or_predict),
        (tensorflow_trainer, "predict", trainer.evaluate_or_predict),
        (tensorflow_trainer, "_make_function", trainer.make_function),
        (tensorflow_trainer, "make_predict_function", trainer.make_predict_function),
        (tensorflow_trainer, "_maybe_symbolic_build", reading.maybe_symbolic_build),
        (Trainer, "_get_metrics_result_or_logs", trainer.get_metrics_result_or_logs),
        (tf_trainer, "TFEpochIterator", lambda _: reading.EpochIterator),
        (tf_trainer.callbacks_module, "CallbackList", lambda _: callbacks.CallbackList),
        (TFVariable, "_initialize", variable.initialize),
        (saving_lib, "save_model", saving.once),
        (saving_lib, "save_weights_only", saving.once),
        (legacy_h5_format, "save_model_to_hdf5", saving.once),
        (keras.Model, "export", saving.once),
        (io_utils, "ask_to_proceed_with_overwrite", saving.ask_to_proceed_with_overwrite),
    ]
