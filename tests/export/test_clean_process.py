"""The process in which an export proves itself: TensorFlow's C library, and none of its Python."""

import json
import subprocess
import sys

import numpy as np
import pytest

from keras_ddl import export
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ExportError
from keras_ddl.export.proof import clean_process, replay
from keras_ddl.export.proof.validate import CleanProcess

DTYPES = ("bool", "int8", "uint16", "int64", "float16", "bfloat16", "float64", "complex64")


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A SavedModel that answers each input, by which its name ends, and some things that are empty."""
    path = tmp_path_factory.mktemp("echo") / "1"
    specs = {name: tf.TensorSpec([None, 2], name, name) for name in (*DTYPES, "string")}

    @tf.function(input_signature=[specs])
    def serve(inputs):
        answers = {f"out_{name}": tf.identity(value) for name, value in inputs.items()}
        return {**answers, "none": inputs["float64"][:0], "one": inputs["string"][0, 0]}

    module = tf.Module()
    module.serve = serve
    tf.saved_model.save(module, str(path), {"serving_default": serve})
    return path


def test_every_dtype_goes_in_and_comes_out(echo):
    rows = {name: np.array([[0, 1], [1, 0], [1, 1]]).astype(tf.as_dtype(name).as_numpy_dtype) for name in DTYPES}
    rows["string"] = np.array([[b"", b"a\0b"], ["ü".encode(), b"x" * 1000], [b"\xff\xfe", b"y"]])
    with CleanProcess() as process:
        told, seconds = process.ask(str(echo), {"serving_default": rows}, 1)
    found, _ = replay.answer_here(str(echo))({"serving_default": rows}, None)
    (answers,), (expected,) = told.values(), found.values()
    assert sorted(answers) == sorted(expected) and len(answers) == len(DTYPES) + 3
    for name, answer in expected.items():
        # Bytes, for NumPy's text pads with zeros at the end.
        assert answers[name].shape == np.shape(answer), name
        assert answers[name].tolist() == np.asarray(answer).tolist(), name
        assert answers[name].dtype.kind == "S" or answers[name].dtype == answer.dtype, name
    assert set(seconds) == {"load", "answer"}


def test_it_imports_nothing_of_tensorflow_s_python(tmp_path):
    request = {"path": str(tmp_path / "nothing"), "config": "", "questions": []}
    done = subprocess.run(
        [sys.executable, "-P", clean_process.__file__],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = json.loads(done.stdout.strip().removeprefix(clean_process.MARK))
    assert told["imported"] == [] and "Could not find SavedModel" in told["failed"], told


def test_a_process_that_dies_is_told(echo, tmp_path):
    with CleanProcess() as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(ExportError, match="as a server does. Received: it ended with status -9"):
            export.validate_saved_model(echo, process=process)
