"""Routing finds a message's model without parsing the message, and encodes valid protobuf messages."""

from __future__ import annotations

import gzip
import time
import zlib
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow_serving.apis import get_model_status_pb2, inference_pb2, model_management_pb2, predict_pb2

from keras_ddl.serving.protocol import bodies, routing
from keras_ddl.serving.protocol.status import Code, RequestError


def request() -> predict_pb2.PredictRequest:
    found = predict_pb2.PredictRequest(output_filter=["y"])
    found.model_spec.name, found.model_spec.signature_name, found.model_spec.version.value = "model", "other", 7
    found.inputs["x"].tensor_content = b"x" * 1000
    return found


def test_model_spec_is_found() -> None:
    message = request()
    assert routing.spec_of(message.SerializeToString()) == message.model_spec
    later = predict_pb2.PredictRequest(inputs=message.inputs).SerializeToString()
    later += predict_pb2.PredictRequest(model_spec=message.model_spec).SerializeToString()
    assert routing.spec_of(later) == message.model_spec  # fields may come in any order
    both = inference_pb2.MultiInferenceRequest()
    both.tasks.add().model_spec.CopyFrom(message.model_spec)
    assert routing.spec_of(both.SerializeToString(), in_task=True) == message.model_spec


def test_model_spec_is_found_after_fields_of_any_length() -> None:
    message = request()
    for length in (*range(300), 2**14, 2**21):
        before = predict_pb2.PredictRequest(output_filter=["\n" * length])
        assert routing.spec_of(before.SerializeToString() + message.SerializeToString()) == message.model_spec, length


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_arbitrary_bytes_have_a_model_or_are_refused(noise: bytes, place: int) -> None:
    data = request().SerializeToString()
    place %= len(data)
    for each in (noise, data[:place] + noise + data[place + len(noise) :]):
        try:
            routing.spec_of(each)
        except RequestError as error:
            assert error.code == Code.INVALID_ARGUMENT


def test_cost_does_not_grow_with_the_message() -> None:
    begin = time.thread_time()
    numbers, fixed = b"\x08\x01" * 30_000_000, b"\x0d\0\0\0\0" * 12_000_000
    for data in (
        b"\x12\x00" * 5_000_000,
        b"\xff" * 10_000_000,
        b"\x0a\x00" * 5_000_000,
        numbers,
        fixed,
        bytes(60_000_000),
    ):
        with pytest.raises(RequestError):
            routing.spec_of(data)
    assert time.thread_time() - begin < 5  # reading all of it would take minutes


def test_only_the_beginning_of_a_compressed_message_is_read() -> None:
    data = request().SerializeToString() + predict_pb2.PredictRequest(output_filter=["y" * 10**8]).SerializeToString()
    blocks = gzip.compress(b"")[:10] + b"\0\0\0\xff\xff" * 10**7  # blocks that decompress to nothing
    assert bodies.encoding_of(data) == "identity" and bodies.beginning(data, "identity") == data
    for encoding, packed in (
        ("gzip", gzip.compress(data, 1)),
        *(("deflate", zlib.compress(data, n)) for n in (1, 6, 9)),
    ):
        begin = time.thread_time()
        assert bodies.encoding_of(packed) == encoding
        first = bodies.beginning(packed, encoding)
        assert len(first) <= 2**16 and routing.spec_of(first) == request().model_spec
        assert time.thread_time() - begin < 0.1  # decompressing all of it takes longer
    assert bodies.beginning(blocks, "gzip") == b""
    with pytest.raises(RequestError):
        bodies.beginning(b"\x1f\x8bno gzip", "gzip")


def test_uncompressed_requests_do_not_look_compressed() -> None:
    for each in (request(), *(predict_pb2.PredictRequest(output_filter=["y" * size]) for size in range(300))):
        assert bodies.encoding_of(each.SerializeToString()) == "identity"
    assert [bodies.encoding_of(each) for each in (b"", b"\x1f", b"\x78")] == ["identity"] * 3


def test_encoded_responses_equal_protobufs() -> None:
    versions = [SimpleNamespace(number=3, state=30, error=""), SimpleNamespace(number=2**40, state=50, error="é" * 200)]
    found = get_model_status_pb2.GetModelStatusResponse.FromString(routing.status_response(versions))
    shown = [(each.version, each.state, each.status.error_code) for each in found.model_version_status]
    assert shown == [(3, 30, 0), (2**40, 50, 2)]
    assert found.model_version_status[1].status.error_message == "é" * 200
    error = RequestError(Code.INTERNAL, "none")
    reloaded = model_management_pb2.ReloadConfigResponse.FromString(routing.reload_response(error))
    assert (reloaded.status.error_code, reloaded.status.error_message) == (13, "none")
    assert routing.reload_response(None) == b""
