"""Serves a model over both interfaces."""

import numpy as np

from harness.serving import predict_request
from keras_ddl.compat.tensorflow import tf

X = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
PREDICT = "/v1/models/model:predict"


def test_predict_returns_all_or_the_requested_outputs(server):
    answer = server.predictions.Predict(predict_request({"x": X}))
    assert sorted(answer.outputs) == ["total", "y"]
    np.testing.assert_array_equal(tf.make_ndarray(answer.outputs["y"]), 3 * np.float32(X))
    assert (answer.model_spec.name, answer.model_spec.version.value) == ("model", 3)
    assert answer.model_spec.signature_name == "serving_default"
    answer = server.predictions.Predict(predict_request({"x": X}, version=3, outputs=["total"]))
    assert list(answer.outputs) == ["total"]
    texts = {"number": np.array([7, 8]), "text": np.array([b"a", b"\xff"], object)}
    answer = server.predictions.Predict(predict_request(texts, signature="pair"))
    assert tf.make_ndarray(answer.outputs["text"]).tolist() == [b"a7", b"\xff8"]
    assert tf.make_ndarray(server.predictions.Predict(predict_request({"x": np.zeros([0, 3])})).outputs["y"]).shape == (
        0,
        3,
    )


def test_rows_and_columns(server):
    status, answer = server.rest("POST", PREDICT, {"instances": X})
    assert status == 200
    assert answer == {"predictions": [{"y": [3, 6, 9], "total": 6}, {"y": [12, 15, 18], "total": 15}]}
    assert server.rest("POST", PREDICT, {"instances": [{"x": row} for row in X]}) == (200, answer)
    columns = {"outputs": {"y": [[3, 6, 9], [12, 15, 18]], "total": [6, 15]}}
    for inputs in (X, {"x": X}):
        assert server.rest("POST", "/v1/models/model/versions/3:predict", {"inputs": inputs}) == (200, columns)
    assert server.rest("POST", PREDICT, '{"inputs": [[NaN, Infinity, 1]]}')[1]["outputs"]["y"][0][1] == float("inf")
