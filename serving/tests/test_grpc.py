"""The gRPC interface, tested with the stubs of tensorflow-serving-api."""

import re

import grpc
import numpy as np
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    model_service_pb2,
    prediction_service_pb2,
    regression_pb2,
    session_service_pb2,
)

from harness.serving import LABELS, predict_request
from keras_ddl.compat.tensorflow import tf

X = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def refused(code, call, said=""):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert re.search(said, caught.value.details()), caught.value.details()
    assert caught.value.code() == getattr(grpc.StatusCode, code), caught.value


def example(**features):
    found = tf.train.Example()
    for name, values in features.items():
        found.features.feature[name].float_list.value.extend(values)
    return found


def with_examples(request, *examples, context=None, signature=""):
    request.model_spec.name, request.model_spec.signature_name = "model", signature
    if context is None:
        request.input.example_list.examples.extend(examples)
    else:
        request.input.example_list_with_context.examples.extend(examples)
        request.input.example_list_with_context.context.CopyFrom(context)
    return request


def test_invalid_requests_have_their_codes(server):
    predict = server.predictions.Predict
    bad_shape, unknown, reference, bomb, short = (predict_request({"x": X}) for _ in range(5))
    bad_shape.inputs["x"].tensor_shape.dim[0].size = -1
    unknown.inputs["x"].dtype = 999
    reference.inputs["x"].dtype = 120
    bomb.inputs["x"].tensor_shape.dim[0].size = 2**50
    short.inputs["x"].tensor_content = b"123"
    for code, request, match in (
        ("INVALID_ARGUMENT", predict_request({}), "Missing but required: .'x'"),
        ("INVALID_ARGUMENT", predict_request({"x": X, "z": [1]}), "Sent extra: .'z'"),
        ("INVALID_ARGUMENT", predict_request({"x": [1.0, 2.0]}), r"must have shape \[None, 3\]"),
        ("INVALID_ARGUMENT", predict_request({"number": [1.5], "text": ["a"]}, signature="pair"), "dtype"),
        ("INVALID_ARGUMENT", predict_request({"x": X}, outputs=["nothing"]), "not found in signature"),
        ("INVALID_ARGUMENT", predict_request({"x": X}, outputs=["y", "y"]), "duplicate"),
        ("INVALID_ARGUMENT", predict_request({"x": X}, name=""), "does not name a model"),
        ("INVALID_ARGUMENT", predict_request({"x": X}, label="best"), "label"),
        ("NOT_FOUND", predict_request({"x": X}, name="other"), "Servable not found"),
        ("NOT_FOUND", predict_request({"x": X}, version=9), "Servable not found"),
        ("FAILED_PRECONDITION", predict_request({"x": X}, signature="other"), "Serving signature key"),
        ("INVALID_ARGUMENT", bad_shape, "unknown dimension"),
        ("INVALID_ARGUMENT", unknown, "Received: number 999"),
        ("INVALID_ARGUMENT", reference, "Received: resource_ref"),
        ("INVALID_ARGUMENT", bomb, "must fit its shape"),
        ("INVALID_ARGUMENT", short, "'x'"),
    ):
        refused(code, lambda: predict(request), match)  # noqa: B023
    too_large = predict_request({"x": np.zeros([6 * 2**20, 3])})
    refused("RESOURCE_EXHAUSTED", lambda: predict(too_large), "larger than max")
    assert server.predict(X).shape == (2, 3)


def test_classify_regress_and_both_at_once(server):
    one, other = example(x=[1, 2, 3]), example(x=[4, 5, 6])
    request = with_examples(classification_pb2.ClassificationRequest(), one, other, signature="classify")
    answer = server.predictions.Classify(request)
    found = [[(each.label, each.score) for each in row.classes] for row in answer.result.classifications]
    assert found == [list(zip(LABELS, [3.0, 6.0, 9.0])), list(zip(LABELS, [12.0, 15.0, 18.0]))]
    request = with_examples(regression_pb2.RegressionRequest(), one, other, signature="regress")
    assert [each.value for each in server.predictions.Regress(request).result.regressions] == [18.0, 45.0]
    # Features of the context are merged into every example.
    context = example(bias=[0.5])
    request = with_examples(regression_pb2.RegressionRequest(), one, context=context, signature="regress")
    assert [each.value for each in server.predictions.Regress(request).result.regressions] == [18.5]

    both = inference_pb2.MultiInferenceRequest()
    both.input.example_list.examples.extend([one])
    for name in ("classify", "regress"):
        task = both.tasks.add(method_name=f"tensorflow/serving/{name}")
        task.model_spec.name, task.model_spec.signature_name = "model", name
    results = server.predictions.MultiInference(both).results
    assert results[0].classification_result.classifications[0].classes[1].score == 6.0
    assert results[1].regression_result.regressions[0].value == 18.0
    assert results[0].model_spec.version.value == 3

    wrong = with_examples(classification_pb2.ClassificationRequest(), one)
    refused("INVALID_ARGUMENT", lambda: server.predictions.Classify(wrong), "not 'inputs' alone")
    empty = with_examples(regression_pb2.RegressionRequest(), signature="regress")
    refused("INVALID_ARGUMENT", lambda: server.predictions.Regress(empty), "Input is empty")
    lacking = with_examples(regression_pb2.RegressionRequest(), example(z=[1]), signature="regress")
    refused("INVALID_ARGUMENT", lambda: server.predictions.Regress(lacking), "required")
    del both.tasks[:]
    refused("INVALID_ARGUMENT", lambda: server.predictions.MultiInference(both), "at least one task")


def test_metadata_status_and_health(server):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "model"
    answer = server.predictions.GetModelMetadata(request)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert answer.metadata["signature_def"].Unpack(signatures)
    assert list(signatures.signature_def["serving_default"].inputs) == ["x"]
    assert signatures.signature_def["classify"].method_name == "tensorflow/serving/classify"
    request.metadata_field.append("weights")
    refused("INVALID_ARGUMENT", lambda: server.predictions.GetModelMetadata(request), "not supported")
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "model"
    (version,) = server.models.GetModelStatus(request).model_version_status
    assert (version.version, version.state) == (3, get_model_status_pb2.ModelVersionStatus.AVAILABLE)
    request.model_spec.name = "other"
    refused("NOT_FOUND", lambda: server.models.GetModelStatus(request), "Could not find")
    health = health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_reload_config_must_name_models(server):
    request = model_management_pb2.ReloadConfigRequest()
    refused("INVALID_ARGUMENT", lambda: server.models.HandleReloadConfigRequest(request), "no config")
    request.config.model_config_list.config.add(name="model")
    refused("INVALID_ARGUMENT", lambda: server.models.HandleReloadConfigRequest(request), "base_path")
    assert server.predict(X).shape == (2, 3)


def test_every_rpc_of_the_package_exists_except_sessions(server):
    """Sends empty requests: an existing method reports what the request lacks, a missing one is UNIMPLEMENTED."""
    stubs = {prediction_service_pb2: server.predictions, model_service_pb2: server.models}
    called = []
    for module, stub in stubs.items():
        (service,) = module.DESCRIPTOR.services_by_name.values()
        for method in service.methods:
            request = message_factory.GetMessageClass(method.input_type)()
            refused("INVALID_ARGUMENT", lambda: getattr(stub, method.name)(request), ".")  # noqa: B023
            called.append(method.name)
    assert sorted(called) == sorted(name for stub in stubs.values() for name in vars(stub))
    assert len(called) == 7
    run = server.channel.unary_unary(
        "/tensorflow.serving.SessionService/SessionRun",
        request_serializer=session_service_pb2.SessionRunRequest.SerializeToString,
        response_deserializer=session_service_pb2.SessionRunResponse.FromString,
    )
    refused("UNIMPLEMENTED", lambda: run(session_service_pb2.SessionRunRequest()))
    assert server.predict(X).shape == (2, 3)


def test_server_does_not_wait_for_a_client_that_gave_up(server):
    request = predict_request({"rounds": np.int32([20_000])}, signature="work")
    refused("DEADLINE_EXCEEDED", lambda: server.predictions.Predict(request, timeout=0.2))
    assert server.predict(X).shape == (2, 3)
