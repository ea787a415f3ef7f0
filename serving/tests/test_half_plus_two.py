"""TensorFlow Serving's first model, x / 2 + 2, made by TensorFlow 1, with the responses known from its docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorflow_serving.apis import classification_pb2, predict_pb2, regression_pb2

from harness.serving import Running, serving
from keras_ddl.compat.tensorflow import tf

v1 = tf.compat.v1
SIGNATURES = v1.saved_model.signature_def_utils


def write_half_plus_two(path: Path) -> None:
    """Writes it as a SavedModel of TensorFlow 1, where x is a tensor parsed from examples, not a placeholder."""
    with v1.Session(graph=tf.Graph()) as session:
        serialized = v1.placeholder(tf.string, name="tf_example")
        parsed = v1.parse_example(serialized, {"x": v1.FixedLenFeature([1], tf.float32)})
        x = tf.identity(parsed["x"], name="x")
        a, b = v1.Variable(0.5, name="a"), v1.Variable(2.0, name="b")
        y = tf.add(tf.multiply(a, x), b, name="y")
        name, numbers, real = tf.constant(b"half", name="name"), tf.constant([2**64 - 1], tf.uint64), tf.constant([0.1])
        signatures = {
            "serving_default": SIGNATURES.predict_signature_def({"x": x}, {"y": y}),
            "regress_x_to_y": SIGNATURES.regression_signature_def(serialized, y),
            "classify_x_to_y": SIGNATURES.classification_signature_def(serialized, None, y),
            "described": SIGNATURES.predict_signature_def({"x": x}, {"name": name, "numbers": numbers, "real": real}),
            "complex": SIGNATURES.predict_signature_def({"x": x}, {"z": tf.complex(y, y)}),
        }
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.builder.SavedModelBuilder(str(path))
        builder.add_meta_graph_and_variables(session, ["serve"], signature_def_map=signatures)
        builder.save()


@pytest.fixture(scope="module")
def half_plus_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("half_plus_two")
    write_half_plus_two(folder / "00000123")
    arguments = [f"--model_base_path={folder}", "--model_name=half", "--grpc_channel_arguments=grpc.lb_policy_name=x"]
    with serving(*arguments) as server:
        server.wait_for(123, "half")
        yield server


def ask(server: Running, method: str, body: dict[str, Any]) -> tuple[int, Any]:
    return server.rest("POST", f"/v1/models/half:{method}", body)


def test_predict_over_grpc(half_plus_two: Running) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    tensor = request.inputs["x"]
    tensor.dtype, tensor.float_val[:] = 1, [2.0]
    tensor.tensor_shape.dim.add(size=1)
    answer = half_plus_two.predictions.Predict(request)
    assert list(answer.outputs["y"].float_val) == [3.0]  # not tensor_content
    assert (answer.model_spec.signature_name, answer.model_spec.version.value) == ("serving_default", 123)


def test_rows_and_columns_of_any_shape(half_plus_two: Running) -> None:
    assert ask(half_plus_two, "predict", {"instances": [1.0, 2.0, 5.0]}) == (200, {"predictions": [2.5, 3.0, 4.5]})
    assert ask(half_plus_two, "predict", {"inputs": [2.0, 3.0]}) == (200, {"outputs": [3.0, 3.5]})
    assert ask(half_plus_two, "predict", {"instances": [[2.0]]}) == (200, {"predictions": [[3.0]]})


def test_classify_and_regress_over_both_interfaces(half_plus_two: Running) -> None:
    body = {"signature_name": "classify_x_to_y", "examples": [{"x": 2.0}]}
    assert ask(half_plus_two, "classify", body) == (200, {"results": [[["", 3.0]]]})
    body = {"signature_name": "regress_x_to_y", "examples": [{"x": 2.0}, {"x": [4.0]}]}
    assert ask(half_plus_two, "regress", body) == (200, {"results": [3.0, 4.0]})
    for request, method in (
        (classification_pb2.ClassificationRequest(), "Classify"),
        (regression_pb2.RegressionRequest(), "Regress"),
    ):
        request.model_spec.name, request.model_spec.signature_name = "half", f"{method.lower()}_x_to_y"
        request.input.example_list.examples.add().features.feature["x"].float_list.value.append(2.0)
        answer = getattr(half_plus_two.predictions, method)(request)
        assert "3" in str(answer.result) and answer.model_spec.version.value == 123


def test_special_values_are_written_exactly(half_plus_two: Running) -> None:
    status, answer = ask(half_plus_two, "predict", {"signature_name": "described", "inputs": [1.0]})
    assert (status, answer) == (200, {"outputs": {"name": "half", "numbers": [2**64 - 1], "real": [0.1]}})
    status, answer = ask(half_plus_two, "predict", {"signature_name": "complex", "inputs": [1.0]})
    assert status == 400 and "complex" in answer["error"]


def test_metadata_has_no_type_entry(half_plus_two: Running) -> None:
    status, answer = half_plus_two.rest("GET", "/v1/models/half/metadata")
    assert status == 200 and "@type" not in json.dumps(answer)
    assert answer["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]["x"]["dtype"] == "DT_FLOAT"


def test_tensorflow_2_model_classifies_despite_its_method_name(tmp_path: Path) -> None:
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "inputs")])
        def scores(self, inputs):
            x = tf.io.parse_example(inputs, {"x": tf.io.FixedLenFeature([1], tf.float32)})["x"]
            return {"scores": x, "outputs": x}

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "1"), {"serving_default": model.scores.get_concrete_function()})
    body = {"examples": [{"x": 2.0}]}
    with serving(tmp_path) as server:
        server.wait_for(1)
        assert server.rest("POST", "/v1/models/model:classify", body) == (200, {"results": [[["", 2.0]]]})
        assert server.rest("POST", "/v1/models/model:regress", body) == (200, {"results": [2.0]})
    with serving(tmp_path, "--enable_signature_method_name_check") as server:
        server.wait_for(1)
        status, answer = server.rest("POST", "/v1/models/model:classify", body)
        assert status == 400 and "method_name" in answer["error"]
