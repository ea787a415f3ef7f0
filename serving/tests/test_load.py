"""Randomly mutated requests: each gets a response, and memory does not grow."""

import http.client
import random

import grpc
import numpy as np
import pytest
from serving_attacks import memory_of
from tensorflow_serving.apis import classification_pb2

from harness.serving import predict_request, serving

X = [[1.0, 2.0, 3.0]]


def mutated(data, generator):
    """Returns the data with some bytes changed, removed, duplicated or inserted."""
    found = bytearray(data)
    for _ in range(generator.randint(0, 5)):
        place = generator.randrange(len(found) + 1)
        kind = generator.randrange(4)
        if kind == 0 and place < len(found):
            found[place] = generator.randrange(256)
        elif kind == 1:
            del found[place : place + generator.randint(1, 16)]
        elif kind == 2:
            found[place:place] = found[place : place + generator.randint(1, 16)]
        else:
            found[place:place] = generator.randbytes(generator.randint(1, 4))
    return bytes(found)


def check_mutated_requests(server, count):
    generator = random.Random(7)
    example = classification_pb2.ClassificationRequest()
    example.model_spec.name, example.model_spec.signature_name = "model", "classify"
    example.input.example_list.examples.add().features.feature["x"].float_list.value.extend([1, 2, 3])
    seeds = [
        ("Predict", predict_request({"x": X}).SerializeToString()),
        (
            "Predict",
            predict_request(
                {"number": np.array([1]), "text": np.array([b"a"], object)}, signature="pair"
            ).SerializeToString(),
        ),
        ("Classify", example.SerializeToString()),
    ]
    bodies = [
        ("predict", b'{"instances": [[1.0, 2.0, 3.0]]}'),
        ("predict", b'{"signature_name": "pair", "inputs": {"number": [1], "text": [{"b64": "YWJj"}]}}'),
        ("regress", b'{"signature_name": "regress", "examples": [{"x": [1.0, 2.0, 3.0], "bias": 0.5}]}'),
    ]
    calls = {
        name: server.channel.unary_unary(f"/tensorflow.serving.PredictionService/{name}")
        for name in ("Predict", "Classify")
    }
    codes, statuses, before = set(), set(), 0
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=60)
    for number in range(count):
        if number == count // 5:
            before = sum(memory_of(server.process.pid).values())
        name, seed = generator.choice(seeds)
        try:
            calls[name](mutated(seed, generator), timeout=30)
            codes.add("OK")
        except grpc.RpcError as error:
            codes.add(error.code().name)
        method, body = generator.choice(bodies)
        connection.request("POST", f"/v1/models/model:{method}", mutated(body, generator))
        answer = connection.getresponse()
        answer.read()
        statuses.add(answer.status)
    connection.close()
    assert codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"}, codes
    assert statuses <= {200, 400, 404, 412}, statuses
    assert {"OK", "INVALID_ARGUMENT"} <= codes and {200, 400} <= statuses
    np.testing.assert_array_equal(server.predict(X), 3 * np.float32(X))
    assert not any("Traceback" in line for line in server.lines), server.lines[-30:]
    return sum(memory_of(server.process.pid).values()) - before


def test_mutated_requests_do_no_harm(server):
    assert check_mutated_requests(server, 500) < 50e6


@pytest.mark.long
def test_memory_is_flat_over_thousands_of_mutated_requests(versions):
    with serving(versions) as server:
        server.wait_for(3)
        assert check_mutated_requests(server, 12_000) < 50e6  # as many over each interface
