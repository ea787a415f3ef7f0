"""Tensors and examples of requests are read, and responses written, as TensorFlow does."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from tensorflow.core.example import example_pb2
from tensorflow.core.framework import tensor_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import classification_pb2

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.prediction import examples, json_values, tensors
from keras_ddl.serving.prediction.servable import Signature
from keras_ddl.serving.protocol.status import Code, RequestError

NUMBERS = [n for n in range(1, 30) if n not in (7, 11, 12, 13, 15, 16, 20, 21, 29)]  # strings, quantized, handles
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def known_dtypes() -> list[np.dtype]:
    return [np.dtype(tf.as_dtype(n).as_numpy_dtype) for n in NUMBERS if n <= 25]


def signature_of(dtype: int, shape: list[int] | None = None) -> Signature:
    info = meta_graph_pb2.TensorInfo(name="x:0", dtype=dtype)
    return Signature("serving_default", "", {"x": info}, {}, {"x": shape})


def read(proto: tensor_pb2.TensorProto, shape: list[int] | None = None) -> np.ndarray:
    return tensors.feeds_of(signature_of(proto.dtype, shape), {"x": proto})["x"]


def read_json(text: str, dtype: tf.DType) -> np.ndarray:
    signatures = {"serving_default": signature_of(dtype.as_datatype_enum)}
    return json_values.predict_request(b'{"inputs": ' + text.encode() + b"}", signatures).inputs["x"]


@EXAMPLES
@given(st.data())
def test_tensors_are_read_as_tensorflow_reads_them(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(known_dtypes()))
    shape = data.draw(arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (raw > 99 if dtype.kind == "b" else raw.view(dtype)).reshape(shape)
    proto = tf.make_tensor_proto(array)
    if (
        data.draw(st.booleans()) or not proto.tensor_content
    ):  # values in the typed field, shortened as TensorFlow may do
        proto = tensors.proto_of(array, as_content=False)
        for field in ("float_val", "int_val", "double_val", "int64_val", "uint32_val", "uint64_val", "half_val"):
            values = getattr(proto, field)
            if len(values) > 1 and data.draw(st.booleans()):
                del values[data.draw(st.integers(1, len(values) - 1)) :]
    found, theirs = read(proto), tf.make_ndarray(proto)
    assert (found.dtype, found.shape, found.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def test_any_nonzero_byte_is_true() -> None:
    proto = tensor_pb2.TensorProto(dtype=tf.bool.as_datatype_enum, tensor_content=b"\0\1\2\xff")
    proto.tensor_shape.dim.add(size=4)
    assert read(proto).tolist() == [False, True, True, True]


def test_only_inputs_with_a_default_may_be_omitted() -> None:
    info = meta_graph_pb2.TensorInfo(name="x:0", dtype=1)
    inputs, defaults = {"x": info, "scale": info}, {"scale": np.float32(2)}
    signature = Signature("serving_default", "", inputs, {}, {"x": None, "scale": None}, defaults)
    x = tf.make_tensor_proto(np.float32([1, 3]))
    assert list(tensors.feeds_of(signature, {"x": x})) == ["x"]
    with pytest.raises(RequestError, match=r"Missing but required: \['x'\]"):
        tensors.feeds_of(signature, {"scale": x})


@EXAMPLES
@given(st.lists(st.binary(max_size=5), min_size=1, max_size=6), st.integers(0, 3))
def test_strings_are_read_as_tensorflow_reads_them(texts: list[bytes], more: int) -> None:
    proto = tensor_pb2.TensorProto(dtype=7, string_val=texts)
    proto.tensor_shape.dim.add(size=len(texts) + more)
    assert read(proto).tolist() == texts + [texts[-1]] * more


@pytest.mark.parametrize("dtype", known_dtypes(), ids=str)
@pytest.mark.parametrize("as_content", [False, True])
def test_responses_are_readable_by_tensorflow(dtype: np.dtype, as_content: bool) -> None:
    array = np.arange(-3, 3).reshape(2, 3).astype(dtype)
    proto = tensors.proto_of(array, as_content=as_content)
    np.testing.assert_array_equal(tf.make_ndarray(proto), array)
    assert bool(proto.tensor_content) == as_content


@pytest.mark.parametrize(
    ("shape", "sizes", "fits"),
    [
        ([-1, 3], [5, 3], True),
        ([-1, 3], [0, 3], True),
        ([-1, 3], [5, 4], False),
        ([-1, 3], [15], False),
        ([-1, 3], [5, 3, 1], False),
        ([], [], True),
        ([], [1], False),
        (None, [2, 2, 2], True),
        (None, [1] * 65, False),
        (None, [2**62, 2**62, 0], False),
        ([-1, -1, -1], [2**62, 2**62, 0], False),
        (None, [2**60], False),
    ],
)
def test_inputs_must_fit_the_signatures_shape(shape, sizes, fits) -> None:
    proto = tensor_pb2.TensorProto(dtype=1, float_val=[1.0])
    for size in sizes:
        proto.tensor_shape.dim.add(size=size)
    if not np.prod(sizes, dtype=object):
        del proto.float_val[:]
    if fits:
        assert read(proto, shape).shape == tuple(sizes)
        return
    with pytest.raises(RequestError) as caught:
        read(proto, shape)
    assert caught.value.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("[18446744073709551615, 0]", tf.uint64, [2**64 - 1, 0]),
        ("[-9223372036854775808, 9223372036854775807]", tf.int64, [-(2**63), 2**63 - 1]),
        ("[1, 2.5]", tf.float32, [1.0, 2.5]),
        ("[[true], [false]]", tf.bool, [[True], [False]]),
        ("[1, 0.5]", tf.bfloat16, [1.0, 0.5]),
        ("[]", tf.float32, []),
        ("3", tf.int32, 3),
    ],
)
def test_json_numbers_get_the_dtype(text, dtype, expected) -> None:
    found = read_json(text, dtype)
    assert found.dtype == dtype.as_numpy_dtype and found.tolist() == expected


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("[1.5]", tf.int32),
        ('["1"]', tf.float32),
        ("[null]", tf.float32),
        ("[true]", tf.int32),
        ("[1]", tf.bool),
        ("[[1], 2]", tf.float32),
        ("[" * 70 + "1" + "]" * 70, tf.float32),
        ("[NaN, 1e400]", tf.float64),
        (f"[{'9' * 400}]", tf.float64),
        (f"[NaN, {'9' * 400}]", tf.float64),
    ],
)
def test_json_numbers_outside_the_dtype_are_refused(text, dtype) -> None:
    with pytest.raises(RequestError) as caught:
        read_json(text, dtype)
    assert caught.value.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
@pytest.mark.parametrize("padded", [True, False])
def test_base64_may_use_either_alphabet_with_or_without_padding(encode, padded) -> None:
    data = bytes(range(250, 256)) * 20 + b"1"
    text = encode(data).decode()
    text = text if padded else text.rstrip("=\n")
    body = json.dumps({"inputs": {"x": [{"b64": text}]}}).encode()
    for mark in (b"", b"\xef\xbb\xbf"):  # a byte order mark, as some clients write it
        request = json_values.predict_request(mark + body, {"serving_default": signature_of(7)})
        assert request.inputs["x"].tolist() == [data]


def test_examples_of_a_message_are_read() -> None:
    request = classification_pb2.ClassificationRequest()
    given_examples = [example_pb2.Example(), example_pb2.Example()]
    given_examples[0].features.feature["a"].float_list.value.append(1.5)
    request.input.example_list_with_context.examples.extend(given_examples)
    request.input.example_list_with_context.context.features.feature["b"].int64_list.value.append(7)
    rows = examples.rows_of(request.input)
    found = [example_pb2.Example.FromString(row) for row in rows]
    assert [sorted(each.features.feature) for each in found] == [["a", "b"], ["b"]]
    request.input.example_list.examples.extend(given_examples[:1])  # the last field of a oneof counts
    rows = examples.rows_of(request.input)
    assert [example_pb2.Example.FromString(row) for row in rows] == given_examples[:1]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((1e39, dtype) for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.complex64, tf.int32, tf.uint64)),
        (-1e39, tf.float32),
        (65520.0, tf.float16),
        (2**200, tf.float32),
        (128, tf.int8),
        (-1, tf.uint8),
        (2**63, tf.int64),
        (2, tf.bool),
    ],
)
def test_number_beyond_the_range_of_a_dtype_is_refused_and_named(value, dtype) -> None:
    for values in (np.array([[0, value], [1, 0]], object), np.array([[0, value], [1, 0]])):
        with pytest.raises(
            (ValueError, OverflowError), match="(1e.39|65520.0|1.6.*e.60|128|-1|9.?2.*|2) is beyond its range"
        ):
            tensors.cast(values, dtype)


def test_largest_number_of_a_dtype_and_infinity_are_accepted() -> None:
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        values = [float(dtype.max), float(dtype.min), -0.0, float("inf"), float("-inf"), float("nan")]
        for each in (np.array(values), np.array(values, object)):
            found = tensors.cast(each, dtype).astype(np.float64)
            np.testing.assert_array_equal(found, values)
            assert np.signbit(found[2])
    assert read_json("[Infinity, -Infinity, 1e38]", tf.float32).tolist() == [np.inf, -np.inf, np.float32(1e38)]
    for dtype in (tf.int8, tf.uint8, tf.int32, tf.int64, tf.uint64):
        assert tensors.cast(np.array([dtype.min, dtype.max], object), dtype).tolist() == [dtype.min, dtype.max]
    with pytest.raises(ValueError, match="1.5 is not a whole number"):
        tensors.cast(np.array([1.0, 1.5]), tf.int32)


def test_json_examples_equal_tensorflows() -> None:
    found = example_pb2.Example.FromString(
        json_values.example_of({"i": [1, -2, 2**62], "f": [1, 0.5], "t": "ä", "b": [{"b64": "/w=="}, "x"], "none": []})
    )
    features = found.features.feature
    assert list(features["i"].int64_list.value) == [1, -2, 2**62]
    assert list(features["f"].float_list.value) == [1, 0.5]
    assert list(features["t"].bytes_list.value) == ["ä".encode()]
    assert list(features["b"].bytes_list.value) == [b"\xff", b"x"]
    for wrong in ({"i": [2**63]}, {"i": [1, "a"]}, {"i": [True]}, {"t": "\ud800"}, {"f": [0.5, 1e39]}):
        with pytest.raises(RequestError):
            json_values.example_of(wrong)


@pytest.mark.parametrize("body", ['{"instances": {"a": %s}}', '{"signature_name": %s}', '{"inputs": {"x": %s}}'])
@pytest.mark.parametrize("dtype", [tf.string, tf.float32])
def test_deeply_nested_values_are_refused(body, dtype) -> None:
    deep = body.replace("%s", "[" * 1000 + "]" * 1000).encode()
    with pytest.raises(RequestError) as caught:
        json_values.predict_request(deep, {"serving_default": signature_of(dtype.as_datatype_enum)})
    assert caught.value.code == Code.INVALID_ARGUMENT
