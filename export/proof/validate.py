"""Proves an export: in a clean process, the SavedModel must answer the stored sample as the trained model did."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export.inference import replay
from keras_ddl.export.proof import clean_process

TOLERANCE = 1e-4  # float32: the order of sums depends on the CPU or GPU, the build and the number of threads
HALF_TOLERANCE = 2e-2  # models that compute in float16 or bfloat16: kernels differ in when they round
_SECONDS = 600.0


class CleanProcess:
    """A process without TensorFlow's Python code, Keras and keras_ddl that answers one request.

    As a context manager it ends the process with the block."""

    def __enter__(self) -> CleanProcess:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KERAS_DDL_")}
        # -P, because modules in the program's folder (signatures, validate, ...) could hide others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", clean_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def ask(
        self, path: str, questions: Mapping[str, Mapping[str, Any]], threads: int | None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """Loads `path` in the process and runs rows through it; a replay.Ask.

        Raises: RuntimeError: the SavedModel cannot be loaded or run. ValueError: it lacks a signature, or has other
            inputs. ExportError: the process fails.
        """
        import numpy as np
        import tensorflow as tf

        signatures = _signatures(path, [replay.DEFAULT, *questions])
        config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=threads or 0, device_count={"GPU": 0})
        request: dict[str, Any] = {"path": path, "config": config.SerializeToString().hex(), "questions": []}
        with tempfile.TemporaryDirectory() as folder:
            for number, (name, rows) in enumerate(questions.items()):
                signature = signatures[name]
                replay.refuse_other_names(rows, signature.inputs)
                dtypes = {alias: tf.as_dtype(info.dtype) for alias, info in signature.inputs.items()}
                files = {kind: str(Path(folder, f"{kind}-{number}.npz")) for kind in ("rows", "answers")}
                replay.save(files["rows"], {alias: _content(row, dtypes[alias]) for alias, row in rows.items()})
                shapes = {alias: list(np.shape(row)) for alias, row in rows.items()}
                inputs = {alias: [info.name, info.dtype, shapes[alias]] for alias, info in signature.inputs.items()}
                outputs = {alias: info.name for alias, info in signature.outputs.items()}
                request["questions"].append({"inputs": inputs, "outputs": outputs, **files})
            response = self._send(request)
            answers: dict[str, dict[str, Any]] = {name: {} for name in questions}
            for name, question, described in zip(questions, request["questions"], response["answers"]):
                with np.load(question["answers"]) as archive:
                    for place, (alias, (dtype, shape)) in enumerate(described.items()):
                        as_numpy, content = tf.as_dtype(dtype).as_numpy_dtype, archive[f"arr_{place}"]
                        if dtype == tf.string:  # removes the dots
                            array = replay.texts([each[:-1] for each in content.tolist()])
                        else:
                            array = content.view(as_numpy)
                        answers[name][alias] = array.reshape(shape)
        return answers, response["seconds"]

    def _send(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            output, errors = self._process.communicate(json.dumps(request) + "\n", timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ExportError(
                f"The clean process must run the sample within {_SECONDS:.0f} s. Received: nothing for "
                f"{request['path']}. Try validate='here', or a smaller sample."
            ) from error
        for line in output.splitlines():
            if line.startswith(clean_process.MARK):
                response = json.loads(line.removeprefix(clean_process.MARK))
                if "failed" in response:
                    raise RuntimeError(response["failed"])
                return response
        tail = "\n".join(errors.splitlines()[-12:])
        raise ExportError(
            f"The clean process must load the SavedModel as a server does. Received: it ended with status "
            f"{self._process.returncode} while loading {request['path']}:\n{tail}"
        )


def _signatures(path: str, names: Iterable[str]) -> dict[str, Any]:
    """Returns name -> SignatureDef. Raises: ValueError: a signature is missing or has a sparse tensor."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString(Path(path, "saved_model.pb").read_bytes())
    served = [graph for graph in saved.meta_graphs if "serve" in graph.meta_info_def.tags]
    definitions = {}
    for name in names:
        if not served or name not in served[0].signature_def:
            raise ValueError(f"there is no signature {name} of a graph tagged 'serve'")
        definitions[name] = served[0].signature_def[name]
        for alias, info in [*definitions[name].inputs.items(), *definitions[name].outputs.items()]:
            if info.WhichOneof("encoding") != "name":
                raise ValueError(f"{alias} is {info.WhichOneof('encoding')}; only dense tensors can be compared")
    return definitions


def _content(row: Any, dtype: Any) -> Any:
    """Returns the array in the form that the clean process reads."""
    import numpy as np
    import tensorflow as tf

    if dtype == tf.string:
        return np.array([each + b"." for each in replay.texts(row).flat], "S")
    return np.frombuffer(np.ascontiguousarray(row, dtype.as_numpy_dtype).tobytes(), np.uint8)


def validate_saved_model(
    path: str | Path,
    sample: str | Path | None = None,
    golden: str | Path | None = None,
    *,
    process: CleanProcess | None = None,
    skip: Iterable[str] = (),
    tolerance: float = TOLERANCE,
    signatures: Mapping[str, Any] | None = None,
    images: Mapping[str, Any] | None = None,
    own_inputs: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Any]:
    """Loads a SavedModel, runs it on `sample` or on the rows in `golden`, and compares with the outputs in `golden`.

    Args:
        sample, golden: .npz files, as in replay.replay.
        process: a running CleanProcess; None: this process.
        skip: random outputs.
        tolerance: largest difference of floats, relative to max(1, largest |golden|) of each output.
        signatures, images: the signatures to run, as in replay.replay; default: serving_default.
        own_inputs: signature -> names of its inputs, if these are not the model's; their rows are named
            "signature/input".
    Returns: as replay.replay.
    Raises: ExportError: the SavedModel does not load, or outputs differ.
    """
    ask = replay.answer_here(str(path)) if process is None else functools.partial(process.ask, str(path))
    rows, answers = (None if file is None else str(file) for file in (sample, golden))
    asked = {replay.DEFAULT: None} if signatures is None else signatures
    try:
        answer = replay.replay(ask, rows, answers, list(skip), tolerance, asked, images or {}, own_inputs or {})
    except ExportError:
        raise
    except Exception as error:  # any failure would also stop a server from answering
        raise ExportError(
            f"A server must load the SavedModel and run the stored sample. Received: {type(error).__name__}: "
            f"{error} Nothing was published. Check the ops with scan_saved_model, and the TensorFlow version."
        ) from error
    if answer["problems"]:
        listed = "; ".join(answer["problems"])
        raise ExportError(
            f"The SavedModel must give the trained model's outputs for the stored sample. Received: {listed}. Nothing "
            "was published. Check that the base graph comes from the same model code and device type."
        )
    return answer
