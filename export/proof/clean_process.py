"""A program that loads a SavedModel and runs rows through it as a server does: through TensorFlow's C library.

It is the clean process of an export's proof (validate.py). It imports neither TensorFlow's Python code nor Keras nor
keras_ddl, so it starts quickly and their code cannot help the model to load. TensorFlow Serving loads a SavedModel with
the same C++ function. The program loads the library before it reads the request, while the exporter is still working.

stdin: one line of JSON, the request. stdout: MARK and one line of JSON. Arrays are passed in .npz files: the bytes of a
tensor, or, for strings, an array of bytes, each with a dot appended, because NumPy drops zeros at the end.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import time
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

MARK = "keras_ddl-answer:"  # TensorFlow or a site hook may also print to stdout
_STRING = 7  # TF_STRING
_STRING_BYTES = 24  # sizeof(TF_TString)


class _Output(Structure):
    """TF_Output: one output of an operation."""

    _fields_ = [("operation", c_void_p), ("index", c_int)]


# name -> (type of the result, types of the arguments); tensorflow/c/c_api.h, tf_tensor.h, tf_status.h, tf_tstring.h
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "TF_NewStatus": (c_void_p, []),
    "TF_GetCode": (c_int, [c_void_p]),
    "TF_Message": (c_char_p, [c_void_p]),
    "TF_NewGraph": (c_void_p, []),
    "TF_NewSessionOptions": (c_void_p, []),
    "TF_SetConfig": (None, [c_void_p, c_char_p, c_size_t, c_void_p]),
    "TF_LoadSessionFromSavedModel": (
        c_void_p,
        [c_void_p, c_void_p, c_char_p, POINTER(c_char_p), c_int, c_void_p, c_void_p, c_void_p],
    ),
    "TF_GraphOperationByName": (c_void_p, [c_void_p, c_char_p]),
    "TF_SessionRun": (
        None,
        [c_void_p, c_void_p, POINTER(_Output), POINTER(c_void_p), c_int, POINTER(_Output), POINTER(c_void_p), c_int]
        + [c_void_p, c_int, c_void_p, c_void_p],
    ),
    "TF_AllocateTensor": (c_void_p, [c_int, POINTER(c_int64), c_int, c_size_t]),
    "TF_TensorData": (c_void_p, [c_void_p]),
    "TF_TensorByteSize": (c_size_t, [c_void_p]),
    "TF_TensorType": (c_int, [c_void_p]),
    "TF_NumDims": (c_int, [c_void_p]),
    "TF_Dim": (c_int64, [c_void_p, c_int]),
    "TF_TensorElementCount": (c_int64, [c_void_p]),
    "TF_StringInit": (None, [c_void_p]),
    "TF_StringCopy": (None, [c_void_p, c_char_p, c_size_t]),
    "TF_StringGetDataPointer": (c_void_p, [c_void_p]),
    "TF_StringGetSize": (c_size_t, [c_void_p]),
}


class Library:
    """The C API of the installed TensorFlow. Its objects are never freed: the process ends after one request."""

    def __init__(self) -> None:
        """Raises: OSError, AttributeError: the library is missing, or lacks a function."""
        spec = importlib.util.find_spec("tensorflow")  # does not import it
        if spec is None or not spec.submodule_search_locations:
            raise OSError("TensorFlow is not installed")
        library = ctypes.CDLL(str(Path(spec.submodule_search_locations[0], "libtensorflow_cc.so.2")))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.status = self.TF_NewStatus()

    def __getattr__(self, name: str) -> Any:  # for type checkers: `__init__` sets the functions
        raise AttributeError(name)

    def check(self) -> None:
        """Raises: RuntimeError: the last call failed."""
        if self.TF_GetCode(self.status) != 0:
            raise RuntimeError(self.TF_Message(self.status).decode(errors="replace"))


def load(library: Library, path: str, config: bytes) -> tuple[Any, Any]:
    """Returns (session, graph) of the graph tagged "serve". Raises: RuntimeError."""
    options, graph = library.TF_NewSessionOptions(), library.TF_NewGraph()
    library.TF_SetConfig(options, config, len(config), library.status)
    library.check()
    tags = (c_char_p * 1)(b"serve")
    session = library.TF_LoadSessionFromSavedModel(options, None, path.encode(), tags, 1, graph, None, library.status)
    library.check()
    return session, graph


def run(library: Library, session: Any, graph: Any, feeds: dict[str, Any], fetches: list[str]) -> list[Any]:
    """Returns the TF_Tensors of `fetches`, names of tensors, for name -> TF_Tensor. Raises: RuntimeError."""
    inputs = (_Output * len(feeds))(*(_place(library, graph, name) for name in feeds))
    outputs = (_Output * len(fetches))(*(_place(library, graph, name) for name in fetches))
    values, answers = (c_void_p * len(feeds))(*feeds.values()), (c_void_p * len(fetches))()
    library.TF_SessionRun(
        *(session, None, inputs, values, len(feeds), outputs, answers, len(fetches), None, 0, None, library.status)
    )
    library.check()
    return list(answers)


def _place(library: Library, graph: Any, name: str) -> _Output:
    operation, _, index = name.partition(":")
    handle = library.TF_GraphOperationByName(graph, operation.encode())
    if not handle:
        raise RuntimeError(f"the signature names {name!r}, which is not in the graph")
    return _Output(handle, int(index or 0))


def tensor_of(library: Library, dtype: int, shape: list[int], content: np.ndarray) -> Any:
    """Returns a TF_Tensor. `content`: its bytes; for strings, an array of bytes with a dot appended to each element."""
    sizes = (c_int64 * len(shape))(*shape)
    if dtype != _STRING:
        content = np.ascontiguousarray(content)
        tensor = library.TF_AllocateTensor(dtype, sizes, len(shape), content.nbytes)
        ctypes.memmove(library.TF_TensorData(tensor), content.ctypes.data, content.nbytes)
        return tensor
    tensor = library.TF_AllocateTensor(dtype, sizes, len(shape), content.size * _STRING_BYTES)
    for number, text in enumerate(content.reshape(-1).tolist()):
        place = library.TF_TensorData(tensor) + number * _STRING_BYTES
        library.TF_StringInit(place)
        library.TF_StringCopy(place, text, len(text) - 1)
    return tensor


def array_of(library: Library, tensor: Any) -> tuple[int, list[int], np.ndarray]:
    """Returns (dtype, shape, content) of a TF_Tensor; the content in the form of `tensor_of`."""
    dtype = library.TF_TensorType(tensor)
    shape = [library.TF_Dim(tensor, axis) for axis in range(library.TF_NumDims(tensor))]
    data = library.TF_TensorData(tensor)
    if dtype != _STRING:
        size = library.TF_TensorByteSize(tensor)
        content = np.ctypeslib.as_array(ctypes.cast(data, POINTER(c_uint8)), (size,)) if size else np.empty(0, np.uint8)
        return dtype, shape, content
    places = [data + number * _STRING_BYTES for number in range(library.TF_TensorElementCount(tensor))]
    texts = [
        ctypes.string_at(library.TF_StringGetDataPointer(place), library.TF_StringGetSize(place)) for place in places
    ]
    return dtype, shape, np.array([text + b"." for text in texts], "S")


def answer(library: Library, request: dict[str, Any]) -> dict[str, Any]:
    """Answers a request.

    Args:
        request: "path"; "config", a ConfigProto in hexadecimal; "questions", each with "inputs" (alias -> [tensor,
            dtype, shape]), "outputs" (alias -> tensor), and the .npz files "rows" (read by alias) and "answers"
            (written in the order of outputs).
    Returns: answers (for each question, alias -> [dtype, shape]) and seconds (to load and to answer).
    """
    start = time.perf_counter()
    session, graph = load(library, request["path"], bytes.fromhex(request["config"]))
    loaded, answers = time.perf_counter(), []
    for question in request["questions"]:
        with np.load(question["rows"]) as archive:
            feeds = {
                tensor: tensor_of(library, dtype, shape, archive[alias])
                for alias, (tensor, dtype, shape) in question["inputs"].items()
            }
        tensors = run(library, session, graph, feeds, list(question["outputs"].values()))
        outputs = {alias: array_of(library, tensor) for alias, tensor in zip(question["outputs"], tensors)}
        # By position, because an alias may be the name of an argument of savez.
        np.savez(question["answers"], *(content for _, _, content in outputs.values()))
        answers.append({alias: [dtype, shape] for alias, (dtype, shape, _) in outputs.items()})
    return {"answers": answers, "seconds": {"load": loaded - start, "answer": time.perf_counter() - loaded}}


def main() -> None:
    """Answers the request on stdin, or ends if there is none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    library = Library()
    line = sys.stdin.readline()
    if not line:
        return
    try:
        result = answer(library, json.loads(line))
    except Exception as error:  # a failure to load the model is the result
        result = {"failed": str(error)}
    result["imported"] = sorted({"tensorflow", "keras", "tf_keras", "keras_ddl"} & set(sys.modules))
    print(MARK + json.dumps(result), flush=True)
    os._exit(0)  # skips destructors: some take long with gigabytes, and TensorFlow's may fail


if __name__ == "__main__":
    main()
