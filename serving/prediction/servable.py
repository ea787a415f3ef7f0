"""A loaded model version: its signatures, and a session that runs them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow.core.protobuf import config_pb2

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.protocol.status import Code, RequestError, invalid

DEFAULT_SIGNATURE = "serving_default"
CLASSIFY = "tensorflow/serving/classify"
REGRESS = "tensorflow/serving/regress"
_INIT = "__saved_model_init_op"  # for loaders, not for clients
_SERVE = "serve"  # the tag of the graph that is served
_CALLABLES = 64  # limit of the cache: each is a pruned graph in TensorFlow, and clients choose the outputs


@dataclass(frozen=True)
class Signature:
    """A function of the model, by the names (aliases) that clients use.

    Attributes:
        inputs, outputs: alias -> TensorInfo.
        shapes: alias of an input -> the shape that its arrays must have, with -1 for any size; None: any rank.
        defaults: values for inputs that a request may leave out.
    """

    name: str
    method: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int] | None] = field(default_factory=dict)
    defaults: Mapping[str, np.ndarray] = field(default_factory=dict)


class Servable:
    """A loaded SavedModel, which stays loaded until its process ends. Thread-safe."""

    def __init__(
        self,
        path: Path,
        name: str,
        version: int,
        *,
        intra_op_threads: int = 0,
        inter_op_threads: int = 0,
        gpu_memory_fraction: float = 0.0,
        tags: Sequence[str] = (_SERVE,),
    ) -> None:
        """Loads the graph that has these tags, with its weights.

        Args:
            intra_op_threads, inter_op_threads: TensorFlow's threads within and between operations; 0: one per core.
            gpu_memory_fraction: share of each GPU's memory; 0: TensorFlow decides.
        Raises: tf.errors.OpError, OSError, ValueError: the model cannot be loaded.
        """
        self.path, self.name, self.version = path, name, version
        graph = tf.Graph()
        options = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=intra_op_threads,
            inter_op_parallelism_threads=inter_op_threads,
            use_per_session_threads=True,  # so that models do not wait for each other's operations
            allow_soft_placement=True,
        )
        options.gpu_options.per_process_gpu_memory_fraction = gpu_memory_fraction
        self._session = tf.compat.v1.Session(graph=graph, config=options)
        with graph.as_default():
            meta_graph = tf.compat.v1.saved_model.load(self._session, list(tags), str(path))
        # Kept unchanged for clients' metadata requests.
        self.signature_defs = dict(meta_graph.signature_def)
        self.signatures = {
            name: _signature(name, each, graph) for name, each in self.signature_defs.items() if name != _INIT
        }
        self._callables: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._lock = threading.Lock()

    def signature(self, name: str) -> Signature:
        """Returns the signature with that name; "": the default one.

        Raises: RequestError: FAILED_PRECONDITION: it does not exist.
        """
        name = name or DEFAULT_SIGNATURE
        signature = self.signatures.get(name)
        if signature is None:
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f'Serving signature key "{name}" not found. The model has {sorted(self.signatures)}.',
            )
        return signature

    def run(self, signature: Signature, feeds: Mapping[str, np.ndarray], fetches: Sequence[str]) -> list[np.ndarray]:
        """Returns the outputs `fetches` for the inputs `feeds`, by alias.

        Args:
            feeds: an array for each input of the signature, of its dtype.
        Raises: RequestError: TensorFlow's error, with its code.
        """
        call = self._callable(signature, tuple(fetches))
        try:
            return [_as_array(each) for each in call(*(feeds[alias] for alias in signature.inputs))]
        except tf.errors.OpError as error:
            raise RequestError(Code(error.error_code), error.message) from None
        except (TypeError, ValueError) as error:  # a feed has a wrong shape, and nothing has run
            raise invalid(str(error)) from None

    def _callable(self, signature: Signature, fetches: tuple[str, ...]) -> Any:
        key = (signature.name, fetches)
        function = self._callables.get(key)
        if function is None:
            options = config_pb2.CallableOptions(
                feed=[_tensor_name(signature, "input", alias) for alias in signature.inputs],
                fetch=[_tensor_name(signature, "output", alias) for alias in fetches],
            )
            with self._lock:
                function = self._callables[key] = tf_compat.session_callable(self._session, options)
                if len(self._callables) > _CALLABLES:
                    del self._callables[next(iter(self._callables))]
        return function


def _as_array(value: Any) -> np.ndarray:
    """Returns TensorFlow's results, including scalars and bytes, as arrays."""
    return np.array(value, dtype=object) if isinstance(value, (bytes, str)) else np.asarray(value)


def _signature(name: str, definition: Any, graph: tf.Graph) -> Signature:
    defaults = {alias: tf.make_ndarray(value) for alias, value in definition.defaults.items()}
    shapes = {alias: _shape(info, graph) for alias, info in definition.inputs.items()}
    return Signature(name, definition.method_name, dict(definition.inputs), dict(definition.outputs), shapes, defaults)


def _shape(info: Any, graph: tf.Graph) -> list[int] | None:
    """Returns the shape that an input must have; None: any.

    Only placeholders require their shape. Signatures of TensorFlow 1 may name other tensors as inputs. Such a tensor
    has the shape that the graph computes, but clients may feed another.
    """
    if info.WhichOneof("encoding") != "name" or info.tensor_shape.unknown_rank:
        return None
    operation = graph.get_tensor_by_name(info.name).op
    return [each.size for each in info.tensor_shape.dim] if operation.type.startswith("Placeholder") else None


def _tensor_name(signature: Signature, kind: str, alias: str) -> str:
    info = (signature.inputs if kind == "input" else signature.outputs)[alias]
    if info.WhichOneof("encoding") != "name":
        raise RequestError(
            Code.UNIMPLEMENTED,
            f"The inputs and outputs of a served signature must be dense tensors. Received: {kind} {alias!r} of "
            f"signature {signature.name!r}, which is {info.WhichOneof('encoding')}. Export a signature over its dense "
            "components.",
        )
    return info.name
