"""`keras-ddl export --format`: models of several kinds in ONNX and TensorFlow Lite, run in their own runtimes.

The conversions need the extras `onnx` and `tflite`, which
tests/project/packaging/test_formats_extra.py installs before it runs these tests.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from export_zoo import ZOO, disturb
from keras import layers

from keras_ddl import export, model_state
from keras_ddl.errors import ConfigError, DependencyError, ExportError
from keras_ddl.export import warmup
from keras_ddl.export.formats import converters

COMMAND = Path(sys.executable).with_name("keras-ddl")
FORMATS = ("onnx", "tflite")


def needs(*names: str) -> Any:
    missing = [name for name in names for module in converters.FORMATS[name].modules if not _found(module)]
    text = f"needs the extras {', '.join(names)}: pip install '.[{','.join(names)}]'"
    return lambda test: pytest.mark.long(pytest.mark.skipif(bool(missing), reason=text)(test))


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def transformer() -> tuple[Any, Any]:
    """Returns a model with attention and the exact GELU, whose second dimension is open, too."""
    tokens = keras.Input((None, 16), name="tokens")
    hidden = layers.LayerNormalization()(tokens)
    hidden = tokens + layers.MultiHeadAttention(2, 8)(hidden, hidden)
    hidden = layers.Dense(64, activation="gelu")(layers.GlobalAveragePooling1D()(hidden))
    rows = np.random.default_rng(1).random((5, 7, 16), dtype="float32")
    return keras.Model(tokens, layers.Dense(64, name="scores")(hidden)), rows


MODELS = {**ZOO, "transformer": transformer}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the checkpoint directory of the model with that name."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(name: str) -> Path:
        model, sample = MODELS[name]()
        base = export.write_base_graph(model, root / name, sample=sample)
        disturb(model)
        model_state.save_checkpoint(model, root / name, 7, 1, {"loss": 0.5}, base=base)
        return root / name

    return make


def contents(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir()) if path.exists() else []


def export_as(checkpoint: Path, out: Path, format: str, **options: Any) -> Any:
    how = functools.partial(export.export_saved_model, checkpoint, validate="off")
    return export.export_format(how, out, format=format, **options)


def ask(file: Path, **rows: np.ndarray) -> dict[str, np.ndarray]:
    """Runs the model as a user's program would, in a process without TensorFlow and keras_ddl."""
    program = {
        ".onnx": """
import onnxruntime
session = onnxruntime.InferenceSession(file)
names = [each.name for each in session.get_outputs()]
answers = dict(zip(names, session.run(names, rows)))
""",
        ".tflite": """
from ai_edge_litert.interpreter import Interpreter
interpreter = Interpreter(model_path=file)
numbers = {each["name"]: each["index"] for each in interpreter.get_input_details()}
for name, array in rows.items():
    interpreter.resize_tensor_input(numbers[f"serving_default_{name}:0"], array.shape)
interpreter.allocate_tensors()
for name, array in rows.items():
    interpreter.set_tensor(numbers[f"serving_default_{name}:0"], array)
interpreter.invoke()
answers = {each["name"]: interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details()}
answers = {name: answer for name, answer in zip(outputs, answers.values())}
""",
    }[file.suffix]
    outputs = list(json.loads((file.parent / "keras_ddl_export.json").read_text())["outputs"])
    np.savez(file.parent.parent / "rows.npz", **rows)
    code = "import sys\nimport numpy as np\nfile, source, into, *outputs = sys.argv[1:]\nrows = dict(np.load(source))"
    code += f"\n{program}\nnp.savez(into, **answers)\nassert 'tensorflow' not in sys.modules"
    arguments = [file, file.parent.parent / "rows.npz", file.parent.parent / "answers.npz", *outputs]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, timeout=120)
    return dict(np.load(arguments[2]))


def served(path: Path, **rows: np.ndarray) -> dict[str, np.ndarray]:
    loaded = tf.saved_model.load(str(path))
    function = loaded.signatures["serving_default"]
    return {name: answer.numpy() for name, answer in function(**{k: tf.constant(v) for k, v in rows.items()}).items()}


CASES = [
    ("onnx", "sequential_cnn"),
    ("onnx", "lstm_with_mask"),
    ("onnx", "transformer"),
    ("tflite", "sequential_cnn"),
    ("tflite", "transformer"),
]


@needs(*FORMATS)
@pytest.mark.parametrize(("format", "name"), CASES)
def test_runtime_gives_outputs_of_the_savedmodel(checkpoints, tmp_path, format, name):
    """The rows, and their number, differ from the stored ones."""
    command = [COMMAND, "export", checkpoints(name), tmp_path / "out", "--format", format, "--version", "step"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers 5 rows as the SavedModel does, " in done.stdout
    assert "as the trained model did" in done.stdout
    version = tmp_path / "out" / "7"
    assert contents(tmp_path / "out") == ["7"]
    assert contents(version) == ["keras_ddl_export.json", f"model.{format}"]
    record = json.loads((version / "keras_ddl_export.json").read_text())
    assert 0 <= record["largest"] < 1e-5 and record["rows"] == 5 and record["sample"] == "stored"
    assert all(shape[0] is None for _, shape in record["inputs"].values()), record["inputs"]
    random = np.random.default_rng(3)
    rows = {
        "sequential_cnn": {"inputs": random.random((3, 8, 8, 1), "float32")},
        "lstm_with_mask": {"ids": random.integers(0, 20, (3, 9)).astype("int32")},
        "transformer": {"tokens": random.normal(size=(3, 4, 16)).astype("float32")},
    }[name]
    expected = served(export.export_saved_model(checkpoints(name), tmp_path / "saved", validate="off").path, **rows)
    answers = ask(version / f"model.{format}", **rows)
    assert set(answers) == set(expected)
    for output in expected:
        np.testing.assert_allclose(answers[output], expected[output], rtol=1e-5, atol=1e-5)


@needs(*FORMATS)
def test_quantized_weights_are_smaller_and_compared(checkpoints, tmp_path):
    results = {
        each: export_as(checkpoints("transformer"), tmp_path, "tflite", quantize=each)
        for each in (None, "float16", "dynamic")
    }
    assert results["float16"].bytes < results[None].bytes
    assert results["dynamic"].bytes < results["float16"].bytes
    records = {k: json.loads((v.path / "keras_ddl_export.json").read_text()) for k, v in results.items()}
    assert 1e-6 < records["float16"]["largest"] < records["float16"]["tolerance"] == 2e-2
    assert 1e-6 < records["dynamic"]["largest"] < records["dynamic"]["tolerance"] == 0.1
    assert records["dynamic"]["quantize"] == "dynamic"


@needs(*FORMATS)
def test_opset_is_the_requested_one(checkpoints, tmp_path):
    import onnx

    for opset in (None, 18):
        path = export_as(checkpoints("sequential_cnn"), tmp_path, "onnx", opset=opset).path
        (found,) = [each.version for each in onnx.load(path / "model.onnx").opset_import if not each.domain]
        assert found == (opset or 15) == json.loads((path / "keras_ddl_export.json").read_text())["opset"]


@needs(*FORMATS)
@pytest.mark.parametrize(
    ("format", "name", "said"),
    [
        ("onnx", "preprocessing", r"StaticRegexReplace \(node '\S+/text_vectorization_\d/StaticRegexReplace'\)"),
        ("onnx", "sampler", r"StatelessRandomNormalV2 \(node"),
        ("tflite", "preprocessing", r"StringLower \(node '\S+/text_vectorization_\d/StringLower'\)"),
        ("tflite", "lstm_with_mask", r"TensorListReserve \(node[^)]*\)\n.*element_shape to be static"),
        ("tflite", "mixed_precision", r"MatMul \(node"),
    ],
)
def test_unsupported_operation_is_named(checkpoints, tmp_path, format, name, said):
    with pytest.raises(ExportError, match=rf"(?s){format} has only some.*{said}.*Nothing was published"):
        export_as(checkpoints(name), tmp_path / "out", format)
    assert contents(tmp_path / "out") == []


@needs(*FORMATS)
@pytest.mark.parametrize("format", FORMATS)
def test_different_outputs_are_refused(checkpoints, tmp_path, monkeypatch, format):
    """Alters the file between the two processes, as a defective converter would have written it."""
    convert = converters.convert

    def convert_wrongly(chosen: Any, path: Path, into: Path, *arguments: Any, **options: Any) -> Any:
        found = convert(chosen, path, into, *arguments, **options)
        weights = tf.train.load_checkpoint(str(path / "variables" / "variables"))
        (name,) = [name for name, shape in weights.get_variable_to_shape_map().items() if shape == [3]]
        bias = weights.get_tensor(name).tobytes()
        data = into.read_bytes()
        assert data.count(bias) == 1
        into.write_bytes(data.replace(bias, np.float32([1, 0, 0]).tobytes()))
        return found

    monkeypatch.setattr(converters, "convert", convert_wrongly)
    with pytest.raises(ExportError, match="answer the sample as the SavedModel.*output_0 differs by 0.*allowed 0.0001"):
        export_as(checkpoints("sequential_cnn"), tmp_path / "out", format)
    assert contents(tmp_path / "out") == []

    def convert_partly(chosen: Any, path: Path, into: Path, *arguments: Any, **options: Any) -> Any:
        found = convert(chosen, path, into, *arguments, **options)
        into.write_bytes(into.read_bytes()[:100])
        return found

    monkeypatch.setattr(converters, "convert", convert_partly)
    with pytest.raises(ExportError, match="load the converted model|ended with status"):
        export_as(checkpoints("sequential_cnn"), tmp_path / "out", format)
    assert contents(tmp_path / "out") == []


@needs(*FORMATS)
def test_any_savedmodel_is_converted_and_versions_are_kept(tmp_path):
    class Words(tf.Module):
        """A lookup table of words, which ONNX supports; its rows are made up; no Keras."""

        def __init__(self) -> None:
            super().__init__()
            keys = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "keras"]), tf.constant([7, 9], tf.int64))
            self.table = tf.lookup.StaticHashTable(keys, -1)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "word")])
        def serve(self, word: Any) -> Any:
            return {"number": self.table.lookup(word)}

    words = Words()
    tf.saved_model.save(words, str(tmp_path / "words"), {"serving_default": words.serve})
    out = tmp_path / "out"
    result = export.export_format(tmp_path / "words", out, format="onnx")
    assert result.path == out / "1" and "2 rows as the SavedModel does, bit for bit" in result.proof
    np.savez(tmp_path / "rows.npz", word=np.array([b"keras", "né".encode(), b""]))
    result = export.export_format(
        tmp_path / "words", out, format="onnx", sample=tmp_path / "rows.npz", version=5, keep=1
    )
    assert result.removed == (1,) and "3 rows" in result.proof and contents(out) == ["5"]
    with pytest.raises(ExportError, match="never overwritten"):
        export.export_format(tmp_path / "words", out, format="onnx", version=5)
    with pytest.raises(ConfigError, match="a source with a step"):
        export.export_format(tmp_path / "words", out, format="onnx", version="step")
    requests = tmp_path / "words" / "assets.extra" / "tf_serving_warmup_requests"
    requests.parent.mkdir()
    requests.write_bytes(b"no record")
    assert export.export_format(tmp_path / "words", out, format="onnx", version=6, keep=1).path == out / "6"
    np.savez(tmp_path / "rows.npz", other=np.zeros(1))
    with pytest.raises(ExportError, match=r"the sample holds \['other'\], the graph takes \['word'\]"):
        export.export_format(tmp_path / "words", out, format="onnx", sample=tmp_path / "rows.npz")
    assert contents(out) == ["6"]


@needs(*FORMATS)
def test_graph_mode_script_is_converted(tmp_path):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        v1.identity(x @ v1.get_variable("w", [4, 3]), "scores")
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(tmp_path / "model"), global_step=30)
    command = [COMMAND, "export", tmp_path / "model-30", tmp_path / "out", "--format", "onnx", "--version", "step"]
    done = subprocess.run([*map(str, command), "--outputs", "scores=scores:0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = np.random.default_rng(0).random((3, 4), "float32")
    answers = ask(tmp_path / "out" / "30" / "model.onnx", x=rows)
    weights = tf.train.load_variable(str(tmp_path / "model-30"), "w")
    np.testing.assert_allclose(answers["scores"], rows @ weights, rtol=1e-6)


@needs(*FORMATS)
def test_weights_above_the_size_limit_are_refused(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(converters, "_LARGEST", 100)
    with pytest.raises(ExportError, match="holds at most.*Serve the SavedModel"):
        export_as(checkpoints("sequential_cnn"), tmp_path / "out", "onnx")
    assert contents(tmp_path / "out") == []


# ---- without the extras ----------------------------------------------------------------------------------------------


def test_missing_package_is_an_error_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    for each, package in {"onnx": "tf2onnx", "tflite": "ai-edge-litert"}.items():
        with pytest.raises(DependencyError, match=rf"Install the extra: .*pip install '{package}>=\S+'( '\S+')*$"):
            export.export_format(lambda path: pytest.fail("was exported"), tmp_path / "out", format=each)
    assert not (tmp_path / "out").exists()


def test_rows_are_read_from_warmup_requests(tmp_path):
    rows = {"x": np.float32([[1, 2], [3, 4]]), "text": np.array([b"a", "né".encode()], object)}
    file = tmp_path / warmup.FILE
    assert warmup.read(file) is None
    types = {"x": ["float32", [None, 2]], "text": ["string", [None]]}
    serving_default, other = (warmup.request("digits", name, rows, types) for name in ("serving_default", "other"))
    warmup.write(file, [other, serving_default])
    found = warmup.read(file)
    np.testing.assert_array_equal(found.pop("x"), rows["x"])
    assert {name: row.tolist() for name, row in found.items()} == {"text": rows["text"].tolist()}
    warmup.write(file, [other])
    assert warmup.read(file) is None
    for data in (b"", b"no record", file.read_bytes()[:-3]):
        file.write_bytes(data)
        assert warmup.read(file) is None


def test_invalid_options_are_refused(tmp_path):
    for options, said in (
        ({"format": "pmml"}, "format must be one of 'onnx', 'tflite'. Received: 'pmml'"),
        ({"format": "onnx", "opset": 99}, "opset must be 9 to 18.*Received: 99"),
        ({"format": "tflite", "opset": 15}, "Received: 15 for tflite"),
        ({"format": "onnx", "quantize": "float16"}, "Received: 'float16' for onnx"),
        ({"format": "tflite", "quantize": "int4"}, "quantize must be one of 'float16', 'dynamic'"),
    ):
        with pytest.raises(ConfigError, match=said):
            export.export_format(tmp_path, tmp_path / "out", **options)


def test_directory_holds_versions_of_one_format(tmp_path, monkeypatch):
    monkeypatch.setattr(converters, "require", lambda chosen: None)  # nothing is converted here
    for kind, file in (("saved", "saved_model.pb"), ("onnx", "model.onnx")):
        (tmp_path / kind / "3").mkdir(parents=True)
        (tmp_path / kind / "3" / file).touch()
    for out, each in (("saved", "onnx"), ("onnx", "tflite")):
        with pytest.raises(ExportError, match="versions of one format.*is to be written"):
            export.export_format(tmp_path / "saved" / "3", tmp_path / out, format=each)
    from keras_ddl.export import versions

    with pytest.raises(ExportError, match=r"versions of one format.*3/model\.onnx, where saved_model\.pb"):
        versions.choose(tmp_path / "onnx", None, None)
    assert versions.choose(tmp_path / "saved", None, None).name == "4"
