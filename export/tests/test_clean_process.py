"""The process in which an export proves itself: TensorFlow's C library, and none of its Python."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_ddl import export, model_state
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ExportError
from keras_ddl.export import warmup
from keras_ddl.export.inference import replay
from keras_ddl.export.proof import clean_process
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
    rows["string"] = np.array([[b"", b"a\0b"], ["ü".encode(), b"x" * 1000], [b"\xff\xfe", b"y\0\0"]], object)
    with CleanProcess() as process:
        told, seconds = process.ask(str(echo), {"serving_default": rows}, 1)
    found, _ = replay.answer_here(str(echo))({"serving_default": rows}, None)
    (answers,), (expected,) = told.values(), found.values()
    assert sorted(answers) == sorted(expected) and len(answers) == len(DTYPES) + 3
    for name, answer in expected.items():
        assert answers[name].shape == np.shape(answer), name
        assert answers[name].tolist() == np.asarray(answer).tolist(), name
        assert answers[name].dtype.kind == "O" or answers[name].dtype == answer.dtype, name
    assert set(seconds) == {"load", "answer"}


@pytest.mark.parametrize(
    "text",
    [[b"ends in zero\0", b"\0", b""], ["größe", b"\xff"], [[b"a"], [b"b"]], b"\0", np.empty([0, 2], "U")],
    ids=repr,
)
def test_text_is_stored_as_it_is(text, tmp_path):
    np.savez(tmp_path / "rows.npz", x=replay.storable(np.asarray(text, object)))
    (found,) = replay.load_rows(str(tmp_path / "rows.npz")).values()
    assert found.tolist() == replay.texts(text).tolist() and found.shape == np.asarray(text, object).shape
    told = replay.compare({"x": replay.storable(found)}, {"x": replay.texts(text)}, 0.0)
    assert told["bitwise"], told
    if found.size:  # a zero more is another text
        longer = replay.texts([each + b"\0" for each in replay.texts(text).flat]).reshape(found.shape)
        assert "differs in" in replay.compare({"x": found}, {"x": longer}, 0.0)["problems"][0]


@pytest.mark.parametrize(
    ("golden", "answer", "equal"),
    [
        ([1.0, np.nan], [1.0, np.nan], True),
        ([1.0, 2.0], [1.0, np.nan], False),
        ([1.0, np.nan], [1.0, 2.0], False),
        ([np.inf, -np.inf], [np.inf, -np.inf], True),
        ([np.inf, 1.0], [-np.inf, 1.0], False),
    ],
)
def test_nan_and_infinity_equal_nothing_but_themselves(golden, answer, equal):
    told = replay.compare({"x": np.array(golden)}, {"x": np.array(answer)}, 1e-4)
    assert (told["problems"] == []) == told["bitwise"] == equal, told


def test_one_wrong_number_among_many_is_told():
    golden, answer = np.zeros(100_000), np.zeros(100_000)
    answer[70_000] = 1e-3
    told = replay.compare({"x": golden}, {"x": answer}, 1e-4)
    assert told["problems"] == ["x differs by 0.001 of its scale (allowed 0.0001)"] and told["largest"] == 1e-3


def test_it_imports_nothing_of_tensorflow_s_python(tmp_path):
    request = {"path": str(tmp_path / "nothing"), "config": "", "questions": []}
    done = subprocess.run(
        [sys.executable, "-P", clean_process.__file__],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = json.loads(done.stdout.strip().removeprefix(clean_process.MARK))
    assert told["imported"] == [] and "Could not find SavedModel" in told["failed"], told


def test_a_process_that_dies_is_told(echo, tmp_path):
    with CleanProcess() as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(ExportError, match="as a server does. Received: it ended with status -9"):
            export.validate_saved_model(echo, process=process)


@pytest.mark.parametrize("text", ["größe", b"zero\0"])
def test_a_sample_of_any_text_is_answered_and_kept(text, tmp_path):
    import keras

    class Text(keras.Model):
        def __init__(self):
            super().__init__()
            self.weight = self.add_weight(shape=())
            self.built = True

        def call(self, x):
            return {"text": x, "bytes": tf.strings.length(x)}

    model = Text()
    spec = tf.TensorSpec([None], tf.string, "x")
    base = export.write_base_graph(model, tmp_path, sample=[text, "x"], input_signature=spec)
    model_state.save_checkpoint(model, tmp_path, 1, base=base)
    found = export.export_saved_model(tmp_path, tmp_path / "out")
    assert "answers 2 rows in a clean process as the trained model did, bit for bit" in found.proof
    encoded = text if isinstance(text, bytes) else text.encode()
    (golden,) = tmp_path.glob("ckpt-*/golden.npz")
    answers = replay.load_rows(str(golden), replay.ANSWERS)
    assert answers["bytes"].tolist() == [len(encoded), 1] and answers["text"].tolist() == [encoded, b"x"]
    asked = warmup.read(found.path / "assets.extra" / warmup.FILE)
    assert asked["x"].tolist() == [encoded, b"x"]


def test_inputs_and_outputs_may_be_named_as_arguments_of_numpy_are(tmp_path):
    inputs = {name: keras.Input((2,), name=name) for name in ("file", "allow_pickle")}
    model = keras.Model(inputs, {name: keras.layers.Dense(2)(each) for name, each in inputs.items()})
    sample = {name: np.ones([3, 2], np.float32) for name in inputs}
    base = export.write_base_graph(model, tmp_path / "ckpt", sample=sample)
    model_state.save_checkpoint(model, tmp_path / "ckpt", 1, base=base)
    result = export.export_saved_model(tmp_path / "ckpt", tmp_path / "out")  # the clean process answers the sample
    assert result.path.is_dir()
    assert sorted(replay.load_rows(tmp_path / "ckpt" / "base" / "sample.npz")) == sorted(inputs)
