"""Replays warm-up requests when a version is loaded, so that its first real request is as fast as the others.

They lie in assets.extra/tf_serving_warmup_requests, a TFRecord of PredictionLog, at most 1,000 (TensorFlow Serving's
format). An error in one is an error of the version, which is then not served.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow_serving.apis import prediction_log_pb2

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving import examples, tensors
from keras_ddl.serving.servable import CLASSIFY, REGRESS, Servable

LOG = logging.getLogger("keras_ddl.serving")
FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MAX_REQUESTS = 1000
_METHODS = {"classify_log": CLASSIFY, "regress_log": REGRESS}


def warm_up(servable: Servable, limit_bytes: int) -> int:
    """Replays the requests that lie beside the model. Returns how many there were.

    Raises: RequestError, ValueError: one of them fails.
    """
    path = servable.path / FILE
    if not path.exists():
        return 0
    count = 0
    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        if count == MAX_REQUESTS:
            raise ValueError(f"{path} has more than {MAX_REQUESTS} requests")
        _replay(servable, prediction_log_pb2.PredictionLog.FromString(record), tensors.Room(limit_bytes))
        count += 1
    return count


def _replay(servable: Servable, log: Any, room: tensors.Room) -> None:
    kind = log.WhichOneof("log_type")
    if kind == "predict_log":
        request = log.predict_log.request
        signature = servable.signature(request.model_spec.signature_name)
        feeds = {**signature.defaults, **tensors.feeds_of(signature, request.inputs, room)}
        servable.run(signature, feeds, tensors.outputs_of(signature, request.output_filter))
    elif kind in _METHODS:
        request = getattr(log, kind).request
        rows = examples.rows_of(request.input, room)
        _replay_examples(servable, request.model_spec, _METHODS[kind], rows)
    elif kind == "multi_inference_log":
        request = log.multi_inference_log.request
        rows = examples.rows_of(request.input, room)
        for task in request.tasks:
            _replay_examples(servable, task.model_spec, task.method_name, rows)
    else:
        raise ValueError(f"a warm-up request of kind {kind}")


def _replay_examples(servable: Servable, spec: Any, method: str, rows: np.ndarray) -> None:
    signature = servable.signature(spec.signature_name)
    examples.check(signature, method, by_name=False)
    servable.run(signature, {examples.INPUT: rows}, examples.fetches(signature, method))
