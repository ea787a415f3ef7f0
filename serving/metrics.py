"""Metrics under TensorFlow Serving's names, and an access log of JSON lines."""

from __future__ import annotations

import datetime
import json
import logging
import time
import traceback
from typing import Any

import prometheus_client

from keras_ddl.serving.background_lines import BackgroundLines
from keras_ddl.serving.protocol.status import Code, RequestError

LOG = logging.getLogger("keras_ddl.serving")
_COUNT = b":tensorflow:serving:request_count"
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
# Microseconds, from 10 us to 20 s.
_BUCKETS = [10 * 1.8**i for i in range(26)]


class Record:
    """What the metrics and the access log record of a request. `method`: "" if unknown."""

    def __init__(self, protocol: str, method: str) -> None:
        self.protocol, self.method = protocol, method
        self.model, self.signature = "", ""
        self.version: int | None = None
        self.error: RequestError | None = None
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    @property
    def status(self) -> str:
        return (self.error.code if self.error is not None else Code.OK).name


class Metrics:
    """Counts requests and logs them. All methods must be called on the event loop."""

    def __init__(self, access_log: BackgroundLines | None = None) -> None:
        self._access_log = access_log
        self.registry = prometheus_client.CollectorRegistry()
        # The leading colon is TensorFlow Serving's; Prometheus accepts such names, though reserved.
        self._count = prometheus_client.Counter(
            _COUNT.decode(),
            "The total number of requests.",
            ["model_name", "status"],
            registry=self.registry,
        )
        self._latency = prometheus_client.Histogram(
            ":tensorflow:serving:request_latency",
            "Distribution of wall time (in microseconds) for a request.",
            ["model_name", "API", "entrypoint"],
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def record_request(self, record: Record, peer: str) -> None:
        """Counts and logs a request, except health checks."""
        if record.method == "Check":
            return
        seconds = record.seconds
        # The client chooses the name. Unknown models share one time series, so that clients cannot create new ones.
        model = record.model if record.version is not None else ""
        self._count.labels(model, record.status).inc()
        self._latency.labels(model, record.method, record.protocol.upper()).observe(seconds * 1e6)
        if self._access_log is not None:
            line: dict[str, Any] = {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                "protocol": record.protocol,
                "method": record.method,
                "model": record.model,
                "version": record.version,
                "signature": record.signature,
                "status": record.status,
                "milliseconds": round(seconds * 1e3, 3),
                "peer": peer,
            }
            if record.error is not None:
                line["error"] = record.error.message[:500]
            self._access_log.write(json.dumps(line) + "\n")

    def log_exception(self, record: Record, error: BaseException) -> None:
        """Logs an unexpected error, a bug of the server."""
        LOG.error("%s %s: %s", record.protocol, record.method, "".join(traceback.format_exception(error)))

    def render(self) -> bytes:
        # TensorFlow Serving's counters do not end in "_total", which prometheus_client adds.
        return prometheus_client.generate_latest(self.registry).replace(_COUNT + b"_total", _COUNT)
