"""Compares the messages that are built without tensorflow-serving-api with the package's."""

import os
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2, prediction_log_pb2  # noqa: F401
from tensorflow_serving.config import model_server_config_pb2  # noqa: F401

from keras_ddl.serving.protocol import messages

# Built at the top level, although the package nests them in other messages.
_POLICY = "FileSystemStoragePathSourceConfig.ServableVersionPolicy"
_NESTED = {
    "LatestVersions": f"{_POLICY}.Latest",
    "AllVersions": f"{_POLICY}.All",
    "SpecificVersions": f"{_POLICY}.Specific",
    "ServableVersionPolicy": _POLICY,
}
_PACKAGE = ".tensorflow.serving."
_POOL = descriptor_pool.Default()


def facts(message, field):
    """Returns the facts about a field that must be equal: number, type, cardinality, oneof."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    kind = field.type_name
    entries = {each.name: each for each in message.nested_type if each.options.map_entry}
    if (entry := entries.get(kind.rpartition(".")[2])) is not None:
        kind = [facts(entry, each) for each in entry.field]
    elif kind.startswith(_PACKAGE):
        kind = _PACKAGE + _NESTED.get(kind.removeprefix(_PACKAGE), kind.removeprefix(_PACKAGE))
    # Presence of single-valued fields is not compared.
    return field.number, field.type, field.label, kind, "" if field.proto3_optional else oneof


@pytest.mark.parametrize("table", [messages.CONTROL, messages.REQUESTS], ids=["control", "requests"])
def test_fields_equal_the_packages(table):
    file = messages.description("any", "tensorflow.serving", table, messages.ENUMS)
    for ours in file.message_type:
        theirs = descriptor_pb2.DescriptorProto()
        _POOL.FindMessageTypeByName((_PACKAGE + _NESTED.get(ours.name, ours.name))[1:]).CopyToProto(theirs)
        their_fields = {field.name: facts(theirs, field) for field in theirs.field}
        our_fields = {field.name: facts(ours, field) for field in ours.field}
        assert our_fields == {field: their_fields[field] for field in our_fields}, ours.name
        if table is messages.CONTROL:  # config files are read with these, so no field may be missing
            assert our_fields.keys() == their_fields.keys(), ours.name


def test_enums_equal_the_packages():
    for name, values in messages.ENUMS.items():
        theirs = _POOL.FindEnumTypeByName((_PACKAGE + name)[1:])
        assert values == {value.name: value.number for value in theirs.values}


PROGRAM = """
import sys
from keras_ddl.serving.protocol import messages
assert sys.modules["tensorflow_serving"] is None
spec = messages.message("ModelSpec").FromString(bytes.fromhex(sys.argv[1]))
assert (spec.name, spec.version.value, spec.signature_name) == ("m", 3, "s"), spec
assert "tensorflow" not in sys.modules
request = messages.message("PredictRequest").FromString(bytes.fromhex(sys.argv[2]))
assert list(request.inputs["x"].float_val) == [1.0, 2.0] and list(request.output_filter) == ["y"]
print(messages.message("SignatureDefMap").DESCRIPTOR.full_name, request.SerializeToString().hex())
"""


def test_messages_without_the_package_have_the_same_bytes():
    request = predict_pb2.PredictRequest(output_filter=["y"], client_id=b"a field that is not built")
    request.model_spec.name, request.model_spec.version.value, request.model_spec.signature_name = "m", 3, "s"
    request.inputs["x"].float_val.extend([1.0, 2.0])
    arguments = [each.SerializeToString().hex() for each in (request.model_spec, request)]
    environment = {**os.environ, "TESTS_HIDE": "tensorflow_serving", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, data = done.stdout.split()
    assert name == "tensorflow.serving.SignatureDefMap"
    assert predict_pb2.PredictRequest.FromString(bytes.fromhex(data)) == request
