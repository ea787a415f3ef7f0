"""The clean process of an export's proof: it uses TensorFlow's C library and no Python of TensorFlow."""

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
    """A SavedModel that returns each input as out_<name>, an empty tensor and a scalar."""
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


def test_clean_process_passes_every_dtype(echo):
    rows = {name: np.array([[0, 1], [1, 0], [1, 1]]).astype(tf.as_dtype(name).as_numpy_dtype) for name in DTYPES}
    rows["string"] = np.array([[b"", b"a\0b"], ["ü".encode(), b"x" * 1000], [b"\xff\xfe", b"y\0\0"]], object)
    with CleanProcess() as process:
        result, seconds = process.ask(str(echo), {"serving_default": rows}, 1)
    found, _ = replay.answer_here(str(echo))({"serving_default": rows}, None)
    (answers,), (expected,) = result.values(), found.values()
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
def test_storable_text_survives_a_round_trip(text, tmp_path):
    np.savez(tmp_path / "rows.npz", x=replay.storable(np.asarray(text, object)))
    (found,) = replay.load_rows(str(tmp_path / "rows.npz")).values()
    assert found.tolist() == replay.texts(text).tolist() and found.shape == np.asarray(text, object).shape
    result = replay.compare({"x": replay.storable(found)}, {"x": replay.texts(text)}, 0.0)
    assert result["bitwise"], result
    if found.size:  # one zero more makes another text
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
def test_compare_nan_and_infinity_equal_only_themselves(golden, answer, equal):
    result = replay.compare({"x": np.array(golden)}, {"x": np.array(answer)}, 1e-4)
    assert (result["problems"] == []) == result["bitwise"] == equal, result


def test_compare_finds_one_wrong_number_among_many():
    golden, answer = np.zeros(100_000), np.zeros(100_000)
    answer[70_000] = 1e-3
    result = replay.compare({"x": golden}, {"x": answer}, 1e-4)
    assert result["problems"] == ["x differs by 0.001 of its scale (allowed 0.0001)"] and result["largest"] == 1e-3


def test_clean_process_imports_no_python_of_tensorflow(tmp_path):
    request = {"path": str(tmp_path / "nothing"), "config": "", "questions": []}
    done = subprocess.run(
        [sys.executable, "-P", clean_process.__file__],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    result = json.loads(done.stdout.strip().removeprefix(clean_process.MARK))
    assert result["imported"] == [] and "Could not find SavedModel" in result["failed"], result


def test_clean_process_death_is_reported(echo, tmp_path):
    with CleanProcess() as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(ExportError, match="as a server does. Received: it ended with status -9"):
            export.validate_saved_model(echo, process=process)


@pytest.mark.parametrize("text", ["größe", b"zero\0"])
def test_sample_of_any_text_is_served_and_stored(text, tmp_path):
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


def test_inputs_and_outputs_may_have_names_of_numpy_arguments(tmp_path):
    inputs = {name: keras.Input((2,), name=name) for name in ("file", "allow_pickle")}
    model = keras.Model(inputs, {name: keras.layers.Dense(2)(each) for name, each in inputs.items()})
    sample = {name: np.ones([3, 2], np.float32) for name in inputs}
    base = export.write_base_graph(model, tmp_path / "ckpt", sample=sample)
    model_state.save_checkpoint(model, tmp_path / "ckpt", 1, base=base)
    result = export.export_saved_model(tmp_path / "ckpt", tmp_path / "out")  # the clean process answers the sample
    assert result.path.is_dir()
    assert sorted(replay.load_rows(tmp_path / "ckpt" / "base" / "sample.npz")) == sorted(inputs)
