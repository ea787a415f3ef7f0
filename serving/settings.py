"""Reads the options of a server from its command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from keras_ddl.errors import ConfigError
from keras_ddl.serving.background_lines import BackgroundLines
from keras_ddl.serving.processes.memory import MEGABYTE
from keras_ddl.serving.protocol import messages

METRICS_PATH = "/monitoring/prometheus/metrics"


@dataclass(frozen=True)
class Options:
    """The options of a server, described for users in serving/docs/serving.md. Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    grpc_port: int = 8500
    rest_port: int = 8501
    health_port: int | None = None
    threads: int = 0
    queue: int = 1000
    message_bytes: int = 64 * MEGABYTE
    memory_bytes: int = 1024 * MEGABYTE
    timeout: float = 30.0
    idle_seconds: float = 75.0
    poll_seconds: float = 1.0
    drain_seconds: float = 30.0
    access_log: BackgroundLines | None = None
    grpc_socket: str | None = None
    grpc_options: tuple[tuple[str, Any], ...] = ()
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
        return self.threads or os.cpu_count() or 1


def server_options(arguments: Mapping[str, Any], access_log: BackgroundLines | None) -> Options:
    """Returns the options for a command line's arguments; `tfs_...` are TensorFlow Serving's flags.

    Raises: ConfigError: a file that an option names is invalid.
    """
    same = {field.name for field in fields(Options)} - {"tags", "modules"}
    options: dict[str, Any] = {name: arguments[name] for name in same if arguments.get(name) is not None}
    options["access_log"] = access_log
    parallelism = arguments.get("tfs_tensorflow_session_parallelism")
    if parallelism is not None:
        options = {"intra_op_threads": parallelism, "inter_op_threads": parallelism, **options}
    if arguments.get("tags") is not None:
        options["tags"] = tuple(arguments["tags"].split(","))
    return Options(
        **options,
        modules=tuple(arguments["modules"]),
        message_bytes=int(arguments["max_message_mb"] * MEGABYTE),
        memory_bytes=int(arguments["max_memory_mb"] * MEGABYTE),
        config_file=arguments.get("model_config_file"),
        metrics_path=_metrics_path(arguments.get("tfs_monitoring_config_file")),
        grpc_options=_channel_arguments(arguments.get("grpc_arguments") or ""),
        allow_reload=arguments["allow_reload_config"],
        allow_any_labels=bool(arguments.get("tfs_allow_version_labels_for_unavailable_models")),
    )


def _metrics_path(path: str | None) -> str | None:
    if path is None:
        return METRICS_PATH
    config = messages.read_file(path, "MonitoringConfig").prometheus_config
    if not config.enable:
        return None
    url = config.path or METRICS_PATH
    if not url.startswith("/"):
        raise ConfigError(f"The path of metrics must begin with '/'. Received: {url!r} in {path!r}.")
    return url


def _channel_arguments(text: str) -> tuple[tuple[str, Any], ...]:
    """Parses "grpc.a=1,grpc.b=text" to pairs."""
    pairs: list[tuple[str, Any]] = []
    for part in filter(None, text.split(",")):
        name, separator, value = part.partition("=")
        if not separator:
            raise ConfigError(f"--grpc_channel_arguments must be NAME=VALUE,NAME=VALUE. Received: {text!r}.")
        is_number = value.removeprefix("-").isdecimal()
        pairs.append((name, int(value) if is_number else value))
    return tuple(pairs)
