"""The options of a server from those of its command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from keras_ddl.errors import ConfigError
from keras_ddl.serving import config_messages, tls
from keras_ddl.serving.memory import MEGABYTE

METRICS_PATH = "/monitoring/prometheus/metrics"
_BATCH_THREADS = 64
# Options of the command line that are those of the server, under the same names.
_SAME = (
    *("host", "grpc_port", "rest_port", "health_port", "queue", "timeout", "idle_seconds", "poll_seconds", "drain_seconds"),
    *("grpc_socket", "cors", "as_tensor_content", "check_method_names", "warm_up", "warm_up_rounds"),
    *("config_poll_seconds", "load_retries", "retry_seconds", "intra_op_threads", "inter_op_threads"),
    "gpu_memory_fraction",
)


@dataclass(frozen=True)
class Options:
    """How a server serves; docs/serving.md says what each means to a user. Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    grpc_port: int = 8500
    rest_port: int = 8501
    health_port: int | None = None
    threads: int = 0
    queue: int = 1000
    batch_rows: int = 0
    batch_seconds: float = 0.0
    message_bytes: int = 64 * MEGABYTE
    memory_bytes: int = 1024 * MEGABYTE
    timeout: float = 30.0
    idle_seconds: float = 75.0
    poll_seconds: float = 1.0
    drain_seconds: float = 30.0
    access_log: TextIO | None = None
    grpc_socket: str | None = None
    grpc_options: tuple[tuple[str, Any], ...] = ()
    tls: tls.Tls | None = None
    cors: bool = False
    metrics_path: str | None = METRICS_PATH
    allow_reload: bool = False
    as_tensor_content: bool = False
    check_method_names: bool = False
    allow_any_labels: bool = False
    warm_up: bool = True
    warm_up_rounds: int = 1
    config_file: str | None = None
    config_poll_seconds: float = 0.0
    load_retries: int | None = None
    retry_seconds: float = 60.0
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    gpu_memory_fraction: float = 0.0
    tags: tuple[str, ...] = ("serve",)
    modules: tuple[str, ...] = ()

    @property
    def computing(self) -> int:
        """How many requests of a model are computed at the same time."""
        return self.threads or os.cpu_count() or 1

    @property
    def model_threads(self) -> int:
        """The threads of a model's process. In batches, requests wait for one another."""
        return max(self.computing, _BATCH_THREADS) if self.batch_rows else self.computing


def server_options(given: Mapping[str, Any], access_log: TextIO | None) -> Options:
    """Returns the options that a command line gives; `tfs_...` are flags of TensorFlow Serving that are not ours.

    Raises: ConfigError: a file that one names is not what it should be.
    """
    found: dict[str, Any] = {name: given[name] for name in _SAME if given.get(name) is not None}
    parallelism = given.get("tfs_tensorflow_session_parallelism")
    if parallelism is not None:
        found = {"intra_op_threads": parallelism, "inter_op_threads": parallelism, **found}
    if given.get("ssl_config_file") is not None:
        found["tls"] = tls.read_file(given["ssl_config_file"])
    if given.get("tags") is not None:
        found["tags"] = tuple(given["tags"].split(","))
    batch_rows, batch_seconds, threads = _batching(given)
    return Options(
        **found,
        threads=threads,
        batch_rows=batch_rows,
        batch_seconds=batch_seconds,
        modules=tuple(given["modules"]),
        message_bytes=int(given["max_message_mb"] * MEGABYTE),
        memory_bytes=int(given["max_memory_mb"] * MEGABYTE),
        access_log=access_log,
        config_file=given.get("model_config_file"),
        metrics_path=_metrics_path(given.get("tfs_monitoring_config_file")),
        grpc_options=_channel_arguments(given.get("grpc_arguments") or ""),
        allow_reload=given["allow_reload_config"],
        allow_any_labels=bool(given.get("tfs_allow_version_labels_for_unavailable_models")),
    )


def _batching(given: Mapping[str, Any]) -> tuple[int, float, int]:
    """Returns the rows of a batch (0: there are none), how long its first request waits, and the threads of a model."""
    threads = given["threads"]
    path = given.get("tfs_batching_parameters_file")
    if path is not None and not given.get("tfs_enable_batching"):
        raise ConfigError("--batching_parameters_file needs --enable_batching, as in TensorFlow Serving.")
    if not given.get("tfs_enable_batching"):
        rows = given["max_batch_size"]
        return rows or 0, given["batch_timeout_ms"] / 1e3, threads
    rows, seconds = given["max_batch_size"] or 1000, 0.0  # TensorFlow Serving's defaults
    if path is not None:
        parameters = config_messages.read_file(path, "BatchingParameters")
        if parameters.HasField("max_batch_size"):
            rows = parameters.max_batch_size.value
        seconds = parameters.batch_timeout_micros.value / 1e6
        threads = threads or parameters.num_batch_threads.value
        if rows < 1 or seconds < 0 or threads < 0:
            raise ConfigError(f"Batching parameters must not be negative. Received: {path!r}: {parameters}.")
    return rows, seconds, threads


def _metrics_path(path: str | None) -> str | None:
    if path is None:
        return METRICS_PATH
    config = config_messages.read_file(path, "MonitoringConfig").prometheus_config
    if not config.enable:
        return None
    found = config.path or METRICS_PATH
    if not found.startswith("/"):
        raise ConfigError(f"The path of metrics must begin with '/'. Received: {found!r} in {path!r}.")
    return found


def _channel_arguments(text: str) -> tuple[tuple[str, Any], ...]:
    """Returns "grpc.a=1,grpc.b=text" as pairs."""
    found: list[tuple[str, Any]] = []
    for part in filter(None, text.split(",")):
        name, separator, value = part.partition("=")
        if not separator:
            raise ConfigError(f"--grpc_channel_arguments takes NAME=VALUE,NAME=VALUE. Received: {text!r}.")
        is_number = value.removeprefix("-").isdecimal()
        found.append((name, int(value) if is_number else value))
    return tuple(found)
