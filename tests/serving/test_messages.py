"""Requests are read from the wire as google.protobuf and TensorFlow read them, without unpacking what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from tensorflow.core.example import example_pb2
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import classification_pb2, predict_pb2

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving import dtypes, json_examples, messages, tensors, wire
from keras_ddl.serving.limits import Unpacked
from keras_ddl.serving.status import Code, RequestError

LIMIT = 2**20
NUMBERS = [number for number in range(1, 30) if dtypes.is_known(number)]
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def known_dtypes() -> list[np.dtype]:
    return [dtypes.numpy_dtype(number) for number in NUMBERS if number != dtypes.STRING]


def read(proto: tensor_pb2.TensorProto) -> np.ndarray:
    data, unpacked = memoryview(proto.SerializeToString()), Unpacked(LIMIT)
    return tensors.array_of("x", tensors.tensor_of("x", data, unpacked), unpacked)


@pytest.mark.parametrize("number", NUMBERS)
def test_dtypes_are_those_of_tensorflow(number: int) -> None:
    theirs = tf.as_dtype(number)
    assert dtypes.name(number) in (theirs.name, "half") and dtypes.numpy_dtype(number) == theirs.as_numpy_dtype


@EXAMPLES
@given(st.data())
def test_tensors_are_read_as_tensorflow_reads_them(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(known_dtypes()))
    shape = data.draw(arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (raw > 99 if dtype.kind == "b" else raw.view(dtype)).reshape(shape)
    proto = tf.make_tensor_proto(array)
    if data.draw(st.booleans()) or not proto.tensor_content:  # the field of values, shortened as TensorFlow may do
        proto = tensor_pb2.TensorProto.FromString(
            b"".join(tensors.field_of(1, array, as_content=False)[2:])  # without the key and length of field 1
        )
        for field in ("float_val", "int_val", "double_val", "int64_val", "uint32_val", "uint64_val", "half_val"):
            values = getattr(proto, field)
            if len(values) > 1 and data.draw(st.booleans()):
                del values[data.draw(st.integers(1, len(values) - 1)) :]
    found, theirs = read(proto), tf.make_ndarray(proto)
    assert (found.dtype, found.shape, found.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


@EXAMPLES
@given(st.lists(st.binary(max_size=5), min_size=1, max_size=6), st.integers(0, 3))
def test_strings_are_read_as_tensorflow_reads_them(texts: list[bytes], more: int) -> None:
    proto = tensor_pb2.TensorProto(dtype=dtypes.STRING, string_val=texts)
    proto.tensor_shape.dim.add(size=len(texts) + more)
    assert read(proto).tolist() == texts + [texts[-1]] * more


@EXAMPLES
@given(st.lists(st.integers(0, 2**64 - 1), max_size=30))
def test_packed_varints_are_those_of_protobuf(values: list[int]) -> None:
    message = tensor_pb2.TensorProto(uint64_val=values).SerializeToString()
    packed = next((value for _, _, value in wire.fields(memoryview(message))), memoryview(b""))
    assert wire.packed_varints(packed, np.dtype(np.uint64), len(values)).tolist() == values
    if values:
        with pytest.raises(RequestError, match="more values"):
            wire.packed_varints(packed, np.dtype(np.uint64), len(values) - 1)


def test_many_varints_are_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PIECE", 7)
    values = [2**shift for shift in range(64)] * 3
    message = tensor_pb2.TensorProto(uint64_val=values).SerializeToString()
    (packed,) = (value for _, _, value in wire.fields(memoryview(message)))
    assert wire.packed_varints(packed, np.dtype(np.uint64), len(values)).tolist() == values


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=80), st.integers(0, 200), st.binary(max_size=8))
def test_any_bytes_are_read_as_protobuf_reads_them_or_refused(noise: bytes, place: int, change: bytes) -> None:
    request = predict_pb2.PredictRequest(output_filter=["y"])
    request.model_spec.name = "model"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.float32([[1, 2], [3, 4]])))
    data = request.SerializeToString()
    place %= len(data)
    data = data[:place] + change + data[place + len(change) :] + noise
    try:
        found = messages.predict_request(data, Unpacked(LIMIT))
        arrays = {alias: tensors.array_of(alias, each, Unpacked(LIMIT)) for alias, each in found.inputs.items()}
    except RequestError as error:
        assert error.code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
        return
    theirs = predict_pb2.PredictRequest.FromString(data)  # what is taken here, protobuf takes
    assert found.spec == theirs.model_spec and list(found.output_filter) == list(theirs.output_filter)
    assert sorted(arrays) == sorted(theirs.inputs)
    for alias, array in arrays.items():
        np.testing.assert_array_equal(array, tf.make_ndarray(theirs.inputs[alias]))


@pytest.mark.parametrize("dtype", known_dtypes(), ids=str)
@pytest.mark.parametrize("as_content", [False, True])
def test_answers_are_messages_that_tensorflow_reads(dtype: np.dtype, as_content: bool) -> None:
    array = np.arange(-3, 3).reshape(2, 3).astype(dtype)
    data = messages.predict_response(predict_pb2.PredictRequest().model_spec, [("y", array)], as_content=as_content)
    proto = predict_pb2.PredictResponse.FromString(data).outputs["y"]
    np.testing.assert_array_equal(tf.make_ndarray(proto), array)
    assert bool(proto.tensor_content) == as_content


def test_a_request_is_counted_before_it_is_unpacked() -> None:
    claimed = tensor_pb2.TensorProto(dtype=1, float_val=[1.0])
    claimed.tensor_shape.dim.add(size=2**40)
    strings = tensor_pb2.TensorProto(dtype=dtypes.STRING, string_val=[b""] * 20_000)
    strings.tensor_shape.dim.add(size=20_000)
    for proto in (claimed, strings):
        with pytest.raises(RequestError, match="after it is unpacked") as caught:
            read(proto)
        assert caught.value.code == Code.RESOURCE_EXHAUSTED
    together = Unpacked(LIMIT)
    half = tf.make_tensor_proto(np.zeros(LIMIT // 5, np.float32)).SerializeToString()
    with pytest.raises(RequestError, match="after it is unpacked"):
        for _ in range(2):  # each alone is below the limit
            tensors.array_of("x", tensors.tensor_of("x", memoryview(half), together), together)


def test_examples_are_those_of_the_message() -> None:
    request = classification_pb2.ClassificationRequest()
    request.model_spec.name = "model"
    given_examples = [example_pb2.Example(), example_pb2.Example()]
    given_examples[0].features.feature["a"].float_list.value.append(1.5)
    request.input.example_list_with_context.examples.extend(given_examples)
    request.input.example_list_with_context.context.features.feature["b"].int64_list.value.append(7)
    message, rows = messages.examples_request(
        request.SerializeToString(), classification_pb2.ClassificationRequest, Unpacked(LIMIT)
    )
    assert message.model_spec.name == "model" and not message.HasField("input")
    found = [example_pb2.Example.FromString(row) for row in rows]
    assert [sorted(each.features.feature) for each in found] == [["a", "b"], ["b"]]
    request.input.example_list.examples.extend(given_examples[:1])  # of a oneof the last counts
    _, rows = messages.examples_request(
        request.SerializeToString(), classification_pb2.ClassificationRequest, Unpacked(LIMIT)
    )
    assert [example_pb2.Example.FromString(row) for row in rows] == given_examples[:1]


def test_examples_of_json_are_tensorflows() -> None:
    found = example_pb2.Example.FromString(
        json_examples.example_of({"i": [1, -2, 2**62], "f": [1, 0.5], "t": "ä", "b": [b"\xff", "x"], "none": []})
    )
    features = found.features.feature
    assert list(features["i"].int64_list.value) == [1, -2, 2**62]
    assert list(features["f"].float_list.value) == [1, 0.5]
    assert list(features["t"].bytes_list.value) == ["ä".encode()]
    assert list(features["b"].bytes_list.value) == [b"\xff", b"x"]
    for wrong in ({"i": [2**63]}, {"i": [1, "a"]}, {"i": [True]}, {"t": "\ud800"}):
        with pytest.raises(RequestError):
            json_examples.example_of(wrong)
