"""Reads weights from files that Keras or TensorFlow wrote, instead of a checkpoint of keras_ddl.

`.weights.h5` and `.keras` name variables by their place in the model, tf.train.Checkpoint by the attributes that lead
to them (object_graphs.py). Both names are recorded when the base graph is traced, because an export has no model.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_ddl import packages
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.errors import DependencyError, ExportError
from keras_ddl.export.inference.isolation import layers_of
from keras_ddl.export.manifest import Manifest
from keras_ddl.export.sources.object_graphs import ObjectGraph

_H5 = (".weights.h5", ".keras")


def read(file: Path, base: Manifest, keys: list[str]) -> dict[str, Any]:
    """Returns base key -> tensor for `keys`.

    Raises: ExportError: the file is missing, truncated or of another kind, or lacks a variable.
    """
    if file.name.endswith(_H5):
        arrays = _from_h5(file, base, keys)
    else:
        arrays = _from_objects(file, base, keys)
    for key, dtype, shape in base["variables"]:
        if key in arrays and (arrays[key].dtype.name, list(arrays[key].shape)) != (dtype, shape):
            raise ExportError(
                f"--weights (weights=) must be a file of the model that wrote the base graph. Received: {file} with "
                f"{arrays[key].dtype.name}{list(arrays[key].shape)} for {bundle.name_of(key)!r}, which is "
                f"{dtype}{shape} in the graph."
            )
    return arrays


def places_in_h5(model: Any, keyed: Mapping[str, Any]) -> dict[str, str]:
    """Returns key -> dataset in the file that `model.save_weights` writes.

    Keras writes a file with numbers instead of weights: each layer's public `save_own_variables` gets a store that
    records which variable is written where. A model that cannot be saved this way has no places.
    """
    import h5py

    known = {id(variable): key for key, variable in keyed.items()}
    written: list[str] = []

    class Store:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __setitem__(self, name: str, value: Any) -> None:
            self.store[name] = len(written) if id(value) in known else -1
            if id(value) in known:
                written.append(known[id(value)])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    layers = [layer for layer in layers_of(model) if "save_own_variables" not in vars(layer)]
    for layer in layers:
        write = layer.save_own_variables
        object.__setattr__(layer, "save_own_variables", lambda store, write=write: write(Store(store)))
    places: dict[str, str] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape == () and 0 <= int(item[()]) < len(written):
            places.setdefault(written[int(item[()])], name)

    try:
        # Layers may override the method in any way, and this is only a convenience, so it must never stop training.
        with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "places.weights.h5")
            model.save_weights(file)
            with h5py.File(file, "r") as opened:
                opened.visititems(visit)
    finally:
        for layer in layers:
            object.__delattr__(layer, "save_own_variables")
    return places


def _from_h5(file: Path, base: Manifest, keys: list[str]) -> dict[str, Any]:
    """Reads a .weights.h5 or .keras file."""
    try:
        import h5py
    except ImportError as error:
        raise DependencyError(
            f"Reading {file} needs h5py. Received: {error}. Install it: {packages.pip_install('h5py')}"
        ) from error
    import tensorflow as tf

    try:
        content = io.BytesIO(zipfile.ZipFile(file).read("model.weights.h5")) if file.suffix == ".keras" else file
        with h5py.File(content, "r") as opened:
            # The file may belong to the complete model, or to the exported part.
            whole_places = base["h5_of_whole"]
            places = (
                whole_places if whole_places and all(whole_places.get(key) in opened for key in keys) else base["h5"]
            )
            missing = [key for key in keys if places.get(key) not in opened]
            if missing:
                raise _missing(file, missing)
            dtypes = {key: tf.as_dtype(dtype) for key, dtype, _ in base["variables"]}
            tensors = {}
            for key in keys:
                array = opened[places[key]][()]
                if array.dtype.kind == "V":  # h5py has no bfloat16
                    array = array.view(dtypes[key].as_numpy_dtype)
                tensors[key] = tf.constant(array)
            return tensors
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise _unreadable(file, error) from error


def _from_objects(file: Path, base: Manifest, keys: list[str]) -> dict[str, Any]:
    """Reads a checkpoint of tf.train.Checkpoint."""
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    if file.is_dir():  # holds the files of a CheckpointManager, or of several save()
        import tensorflow as tf

        file = Path(tf.train.latest_checkpoint(str(file)) or file)
    prefix = str(file).removesuffix(".index")
    if not Path(f"{prefix}.index").exists():
        raise ExportError(
            f"--weights (weights=) takes a .weights.h5 or .keras file or a TensorFlow checkpoint. Received: {file} and "
            f"no {Path(prefix).name}.index. For a checkpoint directory of keras_ddl use --which."
        )
    try:
        entries = bundle.entries(prefix)
        if all(key in entries for key in keys):
            return bundle.read(prefix, {key: entries[key][0] for key in keys})
        graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
            bundle.read(prefix, {bundle.GRAPH: "string"})[bundle.GRAPH].numpy()
        )
        places = ObjectGraph(graph, entries).resolve(base, keys)
        missing = [key for key in keys if key not in places]
        if missing:
            raise _missing(file, missing, _why_hidden(base, missing))
        tensors = bundle.read(prefix, {places[key]: entries[places[key]][0] for key in keys})
        return {key: tensors[places[key]] for key in keys}
    except (OSError, KeyError, DecodeError) as error:
        raise _unreadable(file, error) from error


def _missing(file: Path, keys: list[str], why: str = "") -> ExportError:
    names = ", ".join(bundle.name_of(key) for key in keys[:5])
    return ExportError(
        f"--weights (weights=) must be a file of the model that wrote the base graph. Received: {file} without "
        f"{len(keys)} variables of the graph ({names}){why}. Give another file, or a checkpoint of keras_ddl."
    )


def _why_hidden(base: Manifest, missing: list[str]) -> str:
    hidden = [key for key in missing if key not in base["objects"]]
    if not hidden:
        return ""
    trained = ""
    if set(hidden) & set(base["trainable"]):
        trained = " (a compiled optimizer, or one with momenta, in the same file would have added the trained ones)"
    return (
        f". {len(hidden)} of them are in layers that the model keeps in lists, dicts or nested tuples, which Keras "
        f"3.15 hides from tf.train.Checkpoint: they were never in the file{trained}. Save with tf.train.Checkpoint("
        "model=keras_ddl.model_state.trackable(model)), or model.save_weights('x.weights.h5')"
    )


def _unreadable(file: Path, error: Exception) -> ExportError:
    return ExportError(
        f"--weights (weights=) takes an intact .weights.h5 or .keras file or TensorFlow checkpoint. Received: {file}: "
        f"{type(error).__name__}: {error}. Check that the file is complete."
    )
