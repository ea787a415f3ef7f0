"""Replays warm-up requests when a version is loaded, so that its first real request is as fast as the others.

They are in assets.extra/tf_serving_warmup_requests, a TFRecord of PredictionLog with at most 1,000 (TensorFlow
Serving's format). If one fails, the version is not served.
"""

from __future__ import annotations

from pathlib import Path

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving import messages
from keras_ddl.serving.handlers import Handlers

FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MAX_REQUESTS = 1000
_METHODS = {
    "predict_log": "Predict",
    "classify_log": "Classify",
    "regress_log": "Regress",
    "multi_inference_log": "MultiInference",
}


def warm_up(handlers: Handlers, path: Path) -> int:
    """Replays the warm-up requests of the model in `path`. Returns their number.

    Raises: RequestError, ValueError: a request fails.
    """
    if not (path / FILE).exists():
        return 0
    count = 0
    for record in tf.data.TFRecordDataset(str(path / FILE)).as_numpy_iterator():
        if count == MAX_REQUESTS:
            raise ValueError(f"{path / FILE} has more than {MAX_REQUESTS} requests")
        log = messages.message("PredictionLog").FromString(record)
        kind = log.WhichOneof("log_type")
        if kind not in _METHODS:
            raise ValueError(f"a warm-up request of kind {kind}")
        handlers.respond(_METHODS[kind], getattr(log, kind).request, {})
        count += 1
    return count
