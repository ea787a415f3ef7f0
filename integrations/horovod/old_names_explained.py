"""Says what to use instead of names of TensorFlow 1 and Keras 2, in the errors of scripts that import `horovod`."""

from __future__ import annotations

import contextlib
import re
import sys
from types import TracebackType

# Names of Keras 2 that scripts use and Keras 3 has not -> what to write.
_INSTEAD = {
    "fit_generator": "model.fit, which takes generators and datasets",
    "evaluate_generator": "model.evaluate",
    "set_session": 'tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")',
    "get_session": "eager execution: tensors have numpy()",
    "ImageDataGenerator": "a tf.data.Dataset, and keras.layers.RandomRotation and the like",
}


def install() -> None:
    """Makes an uncaught error of such a kind end with what to use. Imports nothing."""
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # explaining must not hide the error itself
            explain(error)
        hook(kind, error, trace)

    sys.excepthook = excepthook


def explain(error: BaseException) -> None:
    """Adds to the message of an AttributeError or ImportError, if it is about such a name."""
    if isinstance(error, AttributeError):
        name, owner = error.name, error.obj
        old = getattr(getattr(owner, "compat", None), "v1", None)
        of_tensorflow = getattr(owner, "__name__", "") == "tensorflow" and hasattr(old, str(name))
    elif isinstance(error, ImportError):
        match = re.match(r"cannot import name '(\w+)' from '(?:tensorflow\.)?keras", str(error))
        name, of_tensorflow = match and match[1], False
    else:
        return
    if of_tensorflow:
        text = f"It is a name of TensorFlow 1: tf.compat.v1.{name}. Scripts of Keras 3 need no session"
    elif name in _INSTEAD:
        text = f"It is a name of Keras 2. Use {_INSTEAD[name]}"
    else:
        return
    message = f"{error}. {text}; see integrations/horovod/docs/from-horovod.md."
    error.args = (message,)
    if isinstance(error, ImportError):
        error.msg = message
