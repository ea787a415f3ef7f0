"""The REST interface."""

import base64
import socket
import time

import numpy as np
import pytest

from harness.serving import LABELS, predict_request, serving

X = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
PREDICT = "/v1/models/model:predict"


def test_text_and_bytes(server):
    encoded = base64.b64encode(b"\xff\x00").decode()
    rows = [{"number": 1, "text": "a"}, {"number": 2, "text": {"b64": encoded}}]
    status, answer = server.rest("POST", PREDICT, {"signature_name": "pair", "instances": rows})
    assert status == 200
    # Outputs whose names end in _bytes are bytes; others are text if possible.
    assert answer["predictions"][0] == {"text": "a1", "raw_bytes": {"b64": base64.b64encode(b"a").decode()}}
    assert answer["predictions"][1]["raw_bytes"] == {"b64": encoded}
    assert answer["predictions"][1]["text"] == {"b64": base64.b64encode(b"\xff\x002").decode()}


def test_classify_and_regress(server):
    examples = [{"x": [1.0, 2.0, 3.0]}, {"x": [4.0, 5.0, 6.0]}]
    body = {"signature_name": "classify", "examples": examples}
    status, answer = server.rest("POST", "/v1/models/model:classify", body)
    assert status == 200, answer
    assert answer["results"][0] == [list(pair) for pair in zip(LABELS, [3.0, 6.0, 9.0])]
    body = {"signature_name": "regress", "examples": examples, "context": {"bias": 0.5}}
    assert server.rest("POST", "/v1/models/model:regress", body) == (200, {"results": [18.5, 45.5]})


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (PREDICT, "{", 400, "JSON Parse error"),
        (PREDICT, {}, 400, "either"),
        (PREDICT, {"instances": []}, 400, "at least one row"),
        (PREDICT, {"instances": [{"x": X[0]}, {"z": X[0]}]}, 400, "the same inputs"),
        (PREDICT, {"instances": [[[1, 2], [3]]] * 2}, 400, "row 0[0] has length 2, and row 0[1] has length 1"),
        (
            PREDICT,
            {"signature_name": "pair", "inputs": {"number": [1, 2], "text": [["a", "b"], ["c"]]}},
            400,
            "'text' takes string: all rows must have one length; row 0 has length 2, and row 1 has length 1",
        ),
        (PREDICT, {"instances": [[1, 2, 3], [1, 1e39, 3]]}, 400, "'x' takes float32: 1e+39 is beyond its range"),
        (PREDICT, {"inputs": {"z": 1}}, 400, "takes"),
        (PREDICT, {"inputs": [1.0]}, 400, "must have shape [None, 3]"),
        (PREDICT, {"signature_name": "pair", "inputs": {"number": [1.5], "text": ["a"]}}, 400, "'number' takes int64"),
        (PREDICT, {"signature_name": "pair", "inputs": {"number": [1], "text": [{"b64": "?"}]}}, 400, "b64"),
        (PREDICT, {"signature_name": "pair", "inputs": [1]}, 400, "by name"),
        (PREDICT, {"signature_name": "other", "inputs": X}, 400, "Serving signature name"),
        ("/v1/models/other:predict", {"inputs": X}, 404, "Servable not found"),
        ("/v1/models/model/versions/99999999999999999999:predict", {"inputs": X}, 400, "no version"),
        ("/v1/models/model/labels/best:predict", {"inputs": X}, 400, "label"),
        ("/v1/models/model:guess", {"inputs": X}, 400, "Malformed request"),
        ("/v2/models/model:predict", {"inputs": X}, 404, "Malformed request"),
        ("/v1/models/model:classify", {"examples": [{"x": [1.0]}]}, 400, "not 'inputs' alone"),
        ("/v1/models/model:regress", {"signature_name": "regress", "examples": [{"x": [1e39, 1, 1]}]}, 400, "1e+39"),
        ("/v1/models/model:regress", {"signature_name": "regress", "examples": [{"x": [1, None]}]}, 400, "Feature"),
    ],
)
def test_invalid_requests_have_their_status_and_message(server, path, body, status, said):
    found, answer = server.rest("POST", path, body)
    assert found == status, answer
    assert said in answer["error"], answer


def test_status_metadata_metrics_and_health(server):
    expected = {"version": "3", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    for path in ("/v1/models/model", "/v1/models/model/versions/3"):
        status, answer = server.rest("GET", path)
        assert status == 200
        assert answer == {"model_version_status": [expected]}
    status, answer = server.rest("GET", "/v1/models/model/metadata")
    assert status == 200
    assert answer["model_spec"] == {"name": "model", "signature_name": "", "version": "3"}
    signatures = answer["metadata"]["signature_def"]["signature_def"]
    assert signatures["serving_default"]["inputs"]["x"]["dtype"] == "DT_FLOAT"
    assert server.rest("GET", "/healthz") == (200, "ok\n")
    assert server.rest("GET", "/readyz") == (200, "ready\n")
    server.rest("POST", PREDICT, {"instances": X})
    status, text = server.rest("GET", "/monitoring/prometheus/metrics")
    assert status == 200
    counted = ':tensorflow:serving:request_count{model_name="model",status="OK"} '
    assert any(line.startswith(counted) and float(line.split()[-1]) > 0 for line in text.splitlines()), text
    assert 'request_latency_bucket{API="Predict",entrypoint="REST",le="' in text


def test_idle_connections_are_harmless_and_endless_requests_time_out(versions):
    with serving(versions, "--timeout", 4, "--drain-seconds", 0) as server:
        server.wait_for(3)
        idle = [socket.create_connection(("127.0.0.1", server.rest_port)) for _ in range(50)]
        half = socket.create_connection(("127.0.0.1", server.rest_port))
        half.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
        assert b"504" in half.recv(1000).partition(b"\r\n")[0]
        assert server.rest("POST", PREDICT, {"instances": X})[0] == 200
        for each in (*idle, half):
            each.close()
        # A computation that does not end is abandoned in time.
        endless = predict_request({"rounds": np.int32([10**8])}, signature="work")
        computing = server.predictions.Predict.future(endless, timeout=60)
        time.sleep(0.3)
        assert not computing.done() and server.end() == 0
        assert "longer than 0 s are abandoned" in server.lines[-1]
