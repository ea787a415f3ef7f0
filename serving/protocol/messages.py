"""TensorFlow Serving's messages by name: from tensorflow-serving-api if it is installed, else built here.

That package requires the full `tensorflow`, which would overwrite the files of tensorflow-cpu, so `keras-ddl serve`
must not need it. In one process a message can have only one definition, so the package is used if it is installed. The
messages built here have only the fields that the server and `keras-ddl predict` use; other fields of a request are
ignored, as unknown fields are. `serving/tests/test_messages.py` compares them with the package (2.21).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory, text_format, wrappers_pb2

from keras_ddl.errors import ConfigError

_PACKAGE = "tensorflow.serving"
_KINDS = descriptor_pb2.FieldDescriptorProto

# Message -> field -> (number, type). The type is protobuf's, a message of this file, or the full name of another
# message. Before it may stand "repeated", "map" (from strings), or "oneof" and the oneof's name.
Messages = Mapping[str, Mapping[str, tuple[int, str]]]

# Messages for processes without TensorFlow.
CONTROL: Messages = {
    "ModelSpec": {
        "name": (1, "string"),
        "version": (2, "oneof version_choice .google.protobuf.Int64Value"),
        "version_label": (4, "oneof version_choice string"),
        "signature_name": (3, "string"),
    },
    "LatestVersions": {"num_versions": (1, "uint32")},
    "AllVersions": {},
    "SpecificVersions": {"versions": (1, "repeated int64")},
    "ServableVersionPolicy": {
        "latest": (100, "oneof policy_choice LatestVersions"),
        "all": (101, "oneof policy_choice AllVersions"),
        "specific": (102, "oneof policy_choice SpecificVersions"),
    },
    "LogCollectorConfig": {"type": (1, "string"), "filename_prefix": (2, "string")},
    "PerTaskSamplingConfig": {"dc": (1, "string"), "task_index": (2, "int32"), "sampling_rate": (3, "double")},
    "SamplingConfig": {
        "sampling_rate": (1, "double"),
        "per_task_sampling_configs": (3, "repeated PerTaskSamplingConfig"),
        "attributes": (2, "int32"),
    },
    "LoggingConfig": {
        "log_collector_config": (1, "LogCollectorConfig"),
        "sampling_config": (2, "SamplingConfig"),
        "custom_logging_config": (3, ".google.protobuf.Any"),
    },
    "ModelConfig": {
        "name": (1, "string"),
        "base_path": (2, "string"),
        "model_type": (3, "ModelType"),
        "model_platform": (4, "string"),
        "model_version_policy": (7, "ServableVersionPolicy"),
        "version_labels": (8, "map int64"),
        "logging_config": (6, "LoggingConfig"),
    },
    "ModelConfigList": {"config": (1, "repeated ModelConfig")},
    "ModelServerConfig": {
        "model_config_list": (1, "oneof config ModelConfigList"),
        "custom_model_config": (2, "oneof config .google.protobuf.Any"),
    },
}
ENUMS: Mapping[str, Mapping[str, int]] = {"ModelType": {"MODEL_TYPE_UNSPECIFIED": 0, "TENSORFLOW": 1, "OTHER": 2}}

# Requests and responses, which contain TensorFlow's messages.
REQUESTS: Messages = {
    "PredictRequest": {
        "model_spec": (1, "ModelSpec"),
        "inputs": (2, "map .tensorflow.TensorProto"),
        "output_filter": (3, "repeated string"),
    },
    "PredictResponse": {"model_spec": (2, "ModelSpec"), "outputs": (1, "map .tensorflow.TensorProto")},
    "ExampleList": {"examples": (1, "repeated .tensorflow.Example")},
    "ExampleListWithContext": {"examples": (1, "repeated .tensorflow.Example"), "context": (2, ".tensorflow.Example")},
    "Input": {
        "example_list": (1, "oneof kind ExampleList"),
        "example_list_with_context": (2, "oneof kind ExampleListWithContext"),
    },
    "Class": {"label": (1, "string"), "score": (2, "float")},
    "Classifications": {"classes": (1, "repeated Class")},
    "ClassificationResult": {"classifications": (1, "repeated Classifications")},
    "ClassificationRequest": {"model_spec": (1, "ModelSpec"), "input": (2, "Input")},
    "ClassificationResponse": {"model_spec": (2, "ModelSpec"), "result": (1, "ClassificationResult")},
    "Regression": {"value": (1, "float")},
    "RegressionResult": {"regressions": (1, "repeated Regression")},
    "RegressionRequest": {"model_spec": (1, "ModelSpec"), "input": (2, "Input")},
    "RegressionResponse": {"model_spec": (2, "ModelSpec"), "result": (1, "RegressionResult")},
    "InferenceTask": {"model_spec": (1, "ModelSpec"), "method_name": (2, "string")},
    "InferenceResult": {
        "model_spec": (1, "ModelSpec"),
        "classification_result": (2, "oneof result ClassificationResult"),
        "regression_result": (3, "oneof result RegressionResult"),
    },
    "MultiInferenceRequest": {"tasks": (1, "repeated InferenceTask"), "input": (2, "Input")},
    "MultiInferenceResponse": {"results": (1, "repeated InferenceResult")},
    "SignatureDefMap": {"signature_def": (1, "map .tensorflow.SignatureDef")},
    "GetModelMetadataRequest": {"model_spec": (1, "ModelSpec"), "metadata_field": (2, "repeated string")},
    "GetModelMetadataResponse": {"model_spec": (1, "ModelSpec"), "metadata": (2, "map .google.protobuf.Any")},
    "ClassifyLog": {"request": (1, "ClassificationRequest")},
    "RegressLog": {"request": (1, "RegressionRequest")},
    "PredictLog": {"request": (1, "PredictRequest")},
    "MultiInferenceLog": {"request": (1, "MultiInferenceRequest")},
    "PredictStreamedLog": {},
    "SessionRunLog": {},
    "PredictionLog": {
        "classify_log": (2, "oneof log_type ClassifyLog"),
        "regress_log": (3, "oneof log_type RegressLog"),
        "predict_log": (6, "oneof log_type PredictLog"),
        "predict_streamed_log": (7, "oneof log_type PredictStreamedLog"),
        "multi_inference_log": (4, "oneof log_type MultiInferenceLog"),
        "session_run_log": (5, "oneof log_type SessionRunLog"),
    },
}

# Messages of the config file monitoring_config.proto, which tensorflow-serving-api lacks.
_FILES: Messages = {
    "PrometheusConfig": {"enable": (1, "bool"), "path": (2, "string")},
    "MonitoringConfig": {"prometheus_config": (1, "PrometheusConfig")},
}

_PACKAGE_PROTOS = {
    "control": ("apis.model_pb2", "config.model_server_config_pb2"),
    "requests": ("apis.get_model_metadata_pb2", "apis.prediction_log_pb2"),
}
_TENSORFLOW_PROTOS = ("framework.tensor_pb2", "example.example_pb2", "protobuf.meta_graph_pb2")


@functools.cache
def message(name: str) -> Any:
    """Returns the class of a message in CONTROL or REQUESTS. For one of REQUESTS, imports TensorFlow."""
    _define("control")
    if name in REQUESTS:
        _define("requests")
    return _class(descriptor_pool.Default(), _PACKAGE, name)


def read_file(path: str, name: str) -> Any:
    """Reads a MonitoringConfig from a file in protocol buffer text format. Raises: ConfigError."""
    try:
        return text_format.Parse(Path(path).read_text(), _class(_files(), "keras_ddl.serving.config", name)())
    except (text_format.ParseError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"The file must hold a {name} in protobuf text format. Received: {path!r}: {error}."
        ) from None


def _class(pool: descriptor_pool.DescriptorPool, package: str, name: str) -> Any:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))


@functools.cache
def _define(part: str) -> None:
    if importlib.util.find_spec("tensorflow_serving") is not None:
        for module in _PACKAGE_PROTOS[part]:
            importlib.import_module(f"tensorflow_serving.{module}")
        return
    if part == "control":
        files, messages, enums = [any_pb2.DESCRIPTOR, wrappers_pb2.DESCRIPTOR], CONTROL, ENUMS
    else:
        modules = [importlib.import_module(f"tensorflow.core.{module}") for module in _TENSORFLOW_PROTOS]
        files, messages, enums = [any_pb2.DESCRIPTOR, *(module.DESCRIPTOR for module in modules)], REQUESTS, {}
    file = description(part, _PACKAGE, messages, enums)
    file.dependency.extend([each.name for each in files])
    if part == "requests":
        file.dependency.append(_file_name("control"))
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


@functools.cache
def _files() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(description("config", "keras_ddl.serving.config", _FILES).SerializeToString())
    return pool


def _file_name(part: str) -> str:
    return f"serving/{part}.proto"


def description(
    part: str, package: str, messages: Messages, enums: Mapping[str, Mapping[str, int]] | None = None
) -> descriptor_pb2.FileDescriptorProto:
    """Returns the file that defines `messages` and `enums` in `package`, without its dependencies."""
    enums = enums or {}
    file = descriptor_pb2.FileDescriptorProto(name=_file_name(part), package=package, syntax="proto3")
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for value, number in values.items():
            enum.value.add(name=value, number=number)
    for name, fields in messages.items():
        described = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(described, f".{package}", field, number, kind, enums)
    return file


def _add_field(
    described: descriptor_pb2.DescriptorProto,
    package: str,
    name: str,
    number: int,
    kind: str,
    enums: Mapping[str, Mapping[str, int]],
) -> None:
    """Adds a field to the description of a message.

    kind: a type, or the name of an enum or message, after "repeated", "map" or "oneof NAME" if it is one of these.
    """
    *qualifiers, kind = kind.split()
    field = described.field.add(name=name, number=number, label=_KINDS.LABEL_OPTIONAL)
    if qualifiers == ["map"]:
        entry = described.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        for number, (part, part_kind) in enumerate((("key", "string"), ("value", kind)), 1):
            _add_field(entry, package, part, number, part_kind, enums)
        field.label, field.type = _KINDS.LABEL_REPEATED, _KINDS.TYPE_MESSAGE
        field.type_name = f"{package}.{described.name}.{entry.name}"
        return
    if qualifiers == ["repeated"]:
        field.label = _KINDS.LABEL_REPEATED
    elif qualifiers:
        names = [each.name for each in described.oneof_decl]
        if qualifiers[1] not in names:
            described.oneof_decl.add(name=qualifiers[1])
            names.append(qualifiers[1])
        field.oneof_index = names.index(qualifiers[1])
    if kind in enums:
        field.type, field.type_name = _KINDS.TYPE_ENUM, f"{package}.{kind}"
    elif kind.startswith(".") or kind[0].isupper():
        field.type, field.type_name = _KINDS.TYPE_MESSAGE, kind if kind.startswith(".") else f"{package}.{kind}"
    else:
        field.type = getattr(_KINDS, f"TYPE_{kind.upper()}")
