"""Makes functions write each file once, no matter which ranks call them; saving.py does this for Keras's models.

`ONCE` lists the public functions of Keras and TensorFlow that write files under a given name, and now write once if all
ranks call them. `LEFT` lists the functions that stay unchanged, with the reason. tests/strategy/test_written_files.py
looks for such functions in the packages and fails if one is in neither table.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_ddl.compat import replacing
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.state.checksum import checksum
from keras_ddl.strategy import one_per_job
from keras_ddl.strategy.agreement import follow_rank_0
from keras_ddl.strategy.agreement.compared import Compared
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.keras_patches import saving
from keras_ddl.strategy.saving.save_records import Call


@dataclass(frozen=True)
class Writing:
    """Describes how a function writes.

    Attributes:
        path: names of the arguments that make up the path it writes.
        is_whole: its result appears by a single rename, as a file or directory.
        returns_path: it returns the path.
        in_turn: all ranks run it, one after another; later ranks find the output of the first.
    """

    path: tuple[str, ...]
    is_whole: bool = True
    returns_path: bool = False
    in_turn: bool = False


# The class of objects that ExportArchive passes to saved_model.save, and a base class of tf.Module.
_AUTO_TRACKABLE = next(kind for kind in tf.Module.__mro__ if kind.__name__ == "AutoTrackable")
_ASSETS = Writing(("dir_path",), is_whole=False)
ONCE: dict[str, Writing] = {
    "keras.utils.save_img": Writing(("path",)),
    "keras.utils.plot_model": Writing(("to_file",)),
    "keras.utils.get_file": Writing(("cache_dir", "cache_subdir", "fname", "origin"), is_whole=False, in_turn=True),
    "keras.saving.KerasFileEditor.save": Writing(("filepath",)),
    "keras.layers.TextVectorization.save_assets": _ASSETS,
    "keras.layers.StringLookup.save_assets": _ASSETS,
    "keras.layers.IntegerLookup.save_assets": _ASSETS,
    "tensorflow.saved_model.save": Writing(("export_dir",)),
    "tensorflow.data.Dataset.save": Writing(("path",)),
    "tensorflow.io.write_file": Writing(("filename",)),
    "tensorflow.io.write_graph": Writing(("logdir", "name"), is_whole=False, returns_path=True),
    # Called by `write` and `save`, and by CheckpointManager's `save`.
    "tensorflow.train.Checkpoint._write": Writing(("file_prefix",), is_whole=False, returns_path=True),
}
_OF_MODELS = "saving.py replaces the function behind it"
_PRIMITIVE = "like `open`: the program decides what is written, and by which rank"
_OWN_NAME = "each process writes a file with its own name, so nothing is lost; use it on one rank to get one file"
LEFT: dict[str, str] = {
    "keras.Model.export": _OF_MODELS,
    "keras.utils.FeatureSpace.save": _OF_MODELS,
    "keras.saving.KerasFileEditor.resave_weights": "KerasFileEditor.save stands behind it",
    "keras.saving.KerasFileEditor.add_object": "its path is a path inside the file",
    "keras.export.ExportArchive.write_out": "saved_model.save stands behind it",
    "keras.Model.save": _OF_MODELS,
    "keras.Model.save_weights": _OF_MODELS,
    "keras.models.save_model": _OF_MODELS,
    "keras.saving.save_model": _OF_MODELS,
    "keras.saving.save_weights": _OF_MODELS,
    "tensorflow.train.Checkpoint.save": "Checkpoint._write stands behind it",
    "tensorflow.train.Checkpoint.write": "Checkpoint._write stands behind it",
    "tensorflow.train.CheckpointManager.save": "Checkpoint._write stands behind it",
    "tensorflow.io.TFRecordWriter": _PRIMITIVE,
    "tensorflow.io.gfile": _PRIMITIVE,
    "tensorflow.data.experimental.TFRecordWriter": _PRIMITIVE,
    "tensorflow.data.Dataset.cache": "TensorFlow refuses a second process: give each rank its own name",
    "tensorflow.data.experimental.save": "Dataset.save stands behind it",
    "tensorflow.data.experimental.distributed_save": "the workers of tf.data's service write",
    "tensorflow.data.experimental.snapshot": "processes agree among each other by the files themselves",
    "tensorflow.data.Dataset.snapshot": "processes agree among each other by the files themselves",
    "tensorflow.summary.create_file_writer": _OWN_NAME,
    "tensorflow.summary.trace_export": _OWN_NAME,
    "tensorflow.profiler.experimental": _OWN_NAME,
    "tensorflow.debugging.experimental.enable_dump_debug_info": _OWN_NAME,
    "keras.callbacks": "callbacks that write do so on rank 0 (writers.py)",
}


def table() -> replacing.Table:
    """Returns the replacements of the functions in `ONCE`, under every public name that they have."""
    rows: dict[tuple[int, str], tuple[Any, str, Any]] = {}  # several classes may inherit one function
    for name, how in ONCE.items():
        package, *parts = name.split(".")
        owner: Any = keras if package == "keras" else tf
        for part in parts[:-1]:
            owner = getattr(owner, part)
        if inspect.isclass(owner):
            homes = [next(kind for kind in owner.__mro__ if parts[-1] in vars(kind))]
        else:
            homes = _homes_of(getattr(owner, parts[-1]), parts[-1])
        patch = functools.partial(_write_once, name.partition(".")[2], how)
        for home in homes:
            rows.setdefault((id(home), parts[-1]), (home, parts[-1], patch))
    return list(rows.values())


def _homes_of(function: Any, name: str) -> list[Any]:
    modules = [each for key, each in list(sys.modules.items()) if key.partition(".")[0] in ("keras", "tensorflow")]
    return [each for each in modules if inspect.ismodule(each) and vars(each).get(name) is function]


def _write_once(name: str, how: Writing, original: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = _strategy()
    if strategy is None or saving.is_saving.get():
        return original(*args, **kwargs)
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        return original(*args, **kwargs)  # raises the TypeError
    bound.apply_defaults()
    path = _path(bound.arguments, how)
    if path is None:
        return original(*args, **kwargs)
    if how.in_turn:
        with strategy.saves.in_turn(f"keras_ddl {name} {path}"):
            return original(*args, **kwargs)

    def write(staged: str) -> Any:
        if how.is_whole:
            bound.arguments[how.path[0]] = staged
        return original(*bound.args, **bound.kwargs)

    call = Call(name, _content_of(bound.arguments, strategy))
    is_checkpoint = name.endswith("._write")
    appears_as = f"{path}.index" if is_checkpoint else None
    made, returned = saving.write_once(strategy, path, call, write, is_whole=how.is_whole, appears_as=appears_as)
    if not made and is_checkpoint:
        tf_compat.after_checkpoint(path, bound.arguments["options"])
    return returned if made or not how.returns_path else path


def _strategy() -> BaseStrategy | None:
    """Returns a Strategy of this job, or None if only one rank writes now."""
    if not tf.executing_eagerly():  # in a traced step rank 0 writes
        return None
    return next((each for each in one_per_job.alive() if each.is_several), None)


def _path(arguments: Mapping[str, Any], how: Writing) -> str | None:
    parts = [arguments[name] for name in how.path if arguments[name] is not None]
    parts = [each.numpy().decode() if tf.is_tensor(each) and each.dtype == tf.string else each for each in parts]
    if not parts or not all(isinstance(each, (str, os.PathLike)) for each in parts):
        return None
    return str(tf.io.gfile.join(*map(os.fspath, parts)))


def _content_of(arguments: Mapping[str, Any], strategy: BaseStrategy) -> int:
    """Returns a digest of the arguments, as far as they can be compared between ranks."""
    content = 0
    for name, value in arguments.items():
        content = zlib.crc32(f"{name} {_comparable(value, strategy)}".encode(), content)
    return content


def _comparable(value: Any, strategy: BaseStrategy) -> Any:
    if isinstance(value, (list, tuple)):
        return [_comparable(each, strategy) for each in value]
    if isinstance(value, dict):
        return [(str(key), _comparable(each, strategy)) for key, each in value.items()]
    if value is None or isinstance(value, (bool, int, float, str, bytes, os.PathLike)):
        return value
    if isinstance(value, np.ndarray) or (tf.is_tensor(value) and hasattr(value, "numpy")):
        array = np.asarray(value)
        return str(array) if array.dtype.hasobject else (array.shape, str(array.dtype), checksum(array))
    variables = list(_variables_of(value))
    compared = follow_rank_0.digest_of(Compared(variables, strategy.job)) if variables else 0
    vocabulary = value.get_vocabulary() if hasattr(value, "get_vocabulary") else None
    return type(value).__qualname__, compared, vocabulary


def _variables_of(value: Any) -> Iterable[Any]:
    if isinstance(value, keras.Layer):
        return list(value.variables)
    if isinstance(value, (_AUTO_TRACKABLE, tf.train.Checkpoint)):
        found = tf.train.TrackableView(value).descendants()
        return [each for each in found if isinstance(each, (tf.Variable, keras.Variable))]
    return []
