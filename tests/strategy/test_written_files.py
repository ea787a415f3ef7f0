"""Every public function of Keras and TensorFlow that writes files is either made to write once or left alone."""

import inspect
import re
from typing import Any

import keras
import tensorflow as tf

from keras_ddl.strategy.keras_patches import other_files

# Public modules. tf.raw_ops and tf.compat only repeat these functions or hold graph operations.
MODULES = {
    "keras": keras,
    "keras.export": keras.export,
    "keras.layers": keras.layers,
    "keras.models": keras.models,
    "keras.saving": keras.saving,
    "keras.utils": keras.utils,
    "tensorflow": tf,
    "tensorflow.data": tf.data,
    "tensorflow.data.experimental": tf.data.experimental,
    "tensorflow.debugging.experimental": tf.debugging.experimental,
    "tensorflow.io": tf.io,
    "tensorflow.saved_model": tf.saved_model,
    "tensorflow.summary": tf.summary,
    "tensorflow.train": tf.train,
}
_PATH = re.compile(r"(file|path|dir$|directory|prefix|folder|^fname$|^logdir$|^profiler_outdir$)", re.IGNORECASE)
_WRITES = re.compile(r"(save|write|writer|export|dump|snapshot|cache|get_file|plot_|add_)", re.IGNORECASE)
# These match the patterns, but write no file under a given name.
_WRITE_NOTHING = {
    "tensorflow.saved_model.contains_saved_model",
    "tensorflow.train.get_checkpoint_state",
    "tensorflow.train.latest_checkpoint",
}


def writing_functions() -> set[str]:
    found = set()
    for module, owner in MODULES.items():
        for name in dir(owner):
            value = getattr(owner, name, None)
            if name.startswith("_") or inspect.ismodule(value):
                continue
            methods = {"": value} if not inspect.isclass(value) else dict(inspect.getmembers(value, inspect.isfunction))
            for method, function in methods.items():
                if method == "__init__":
                    full = f"{module}.{name}"
                elif method.startswith("_"):
                    continue
                else:
                    full = f"{module}.{name}" + (f".{method}" if method else "")
                if _WRITES.search(full.removeprefix(module)) and _takes_a_path(function):
                    found.add(full)
    return found - _WRITE_NOTHING


def _takes_a_path(function: Any) -> bool:
    try:
        return any(_PATH.search(name) for name in inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False


def _defined(name: str) -> Any:
    package, *parts = name.split(".")
    owner: Any = keras if package == "keras" else tf
    for part in parts:
        owner = getattr(owner, part)
    return inspect.unwrap(owner) if callable(owner) else owner


def test_every_public_function_that_writes_a_file_is_classified() -> None:
    decided = {*other_files.ONCE, *other_files.LEFT}
    same = [_defined(name) for name in decided]
    undecided = [
        name
        for name in sorted(writing_functions())
        if not any(name == one or name.startswith(f"{one}.") for one in decided)
        and not any(_defined(name) is each for each in same)
    ]
    assert not undecided, undecided
