"""TensorFlow Serving's flags, all of which keras-ddl serve accepts, and the effect of each (serving/docs/serving.md).

Source: tensorflow_serving/model_servers/main.cc (2.19).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Support(enum.Enum):
    """The degree of support for a flag."""

    WORKS = "works"
    DIFFERS = "differs"
    NO_EFFECT = "has no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Flag:
    """A flag.

    Attributes:
        kind: type of its value.
        option: the parameter of keras-ddl serve that it sets; "": none, or `tfs_` with the flag's name.
        note: how the flag differs, or why it has no effect or is refused.
        scale: factor for its value.
    """

    name: str
    kind: type
    support: Support
    option: str = ""
    note: str = ""
    scale: float = 1.0


W, D, N, R = Support.WORKS, Support.DIFFERS, Support.NO_EFFECT, Support.REFUSED
_ONE_LOOP = "requests are read on one event loop"
_ONE_BY_ONE = "each request is computed separately"
FLAGS = (
    Flag("port", int, W, "grpc_port"),
    Flag("grpc_socket_path", str, W, "grpc_socket"),
    Flag("rest_api_port", int, D, "rest_port", "0 chooses a port (it does not turn REST off), and the default is 8501"),
    Flag("rest_api_num_threads", int, N, note=_ONE_LOOP),
    Flag("rest_api_timeout_in_ms", float, D, "timeout", "also for requests over gRPC", 1e-3),
    Flag("rest_api_enable_cors_support", bool, W, "cors"),
    Flag("enable_cors_support", bool, W, "cors"),
    Flag("enable_batching", bool, N, note=_ONE_BY_ONE),
    Flag("allow_version_labels_for_unavailable_models", bool, W),
    Flag("batching_parameters_file", str, N, note=_ONE_BY_ONE),
    Flag("model_config_file", str, W, "model_config_file"),
    Flag("model_config_file_poll_wait_seconds", float, W, "config_poll_seconds"),
    Flag("model_name", str, D, "model_name", 'the default is "model", not "default"'),
    Flag("model_base_path", str, W),
    Flag("num_load_threads", int, N, note="versions are loaded one after the other"),
    Flag("num_unload_threads", int, N, note="versions are unloaded one after the other"),
    Flag("max_num_load_retries", int, D, "load_retries", "the default is to try forever, not 5 times"),
    Flag("load_retry_interval_micros", float, W, "retry_seconds", scale=1e-6),
    Flag("file_system_poll_wait_seconds", float, D, "poll_seconds", "it must be positive"),
    Flag("flush_filesystem_caches", bool, N, note="files are read as TensorFlow reads them"),
    Flag("tensorflow_session_parallelism", int, W),
    Flag("tensorflow_intra_op_parallelism", int, W, "intra_op_threads"),
    Flag("tensorflow_inter_op_parallelism", int, W, "inter_op_threads"),
    Flag("use_alts_credentials", bool, R, note="ALTS is for Google's own network; for TLS put a proxy in front"),
    Flag("ssl_config_file", str, R, note="for TLS put a proxy such as nginx or Envoy in front"),
    Flag("platform_config_file", str, R, note="TensorFlow is the only platform"),
    Flag("per_process_gpu_memory_fraction", float, W, "gpu_memory_fraction"),
    Flag("saved_model_tags", str, W, "tags"),
    Flag("grpc_channel_arguments", str, W, "grpc_arguments"),
    Flag("grpc_max_threads", int, N, note=_ONE_LOOP),
    Flag("enable_model_warmup", bool, W, "warm_up"),
    Flag("num_request_iterations_for_warmup", int, W, "warm_up_rounds"),
    Flag("monitoring_config_file", str, D, note="without it, metrics are shown"),
    Flag("remove_unused_fields_from_bundle_metagraph", bool, N, note="graphs are never kept next to their sessions"),
    Flag("prefer_tflite_model", bool, R, note="there is no TensorFlow Lite here"),
    Flag("num_tflite_pools", int, R, note="there is no TensorFlow Lite here"),
    Flag("num_tflite_interpreters_per_pool", int, R, note="there is no TensorFlow Lite here"),
    Flag("enable_signature_method_name_check", bool, W, "check_method_names"),
    Flag("xla_cpu_compilation_enabled", bool, R, note="set TF_XLA_FLAGS=--tf_xla_cpu_global_jit in the environment"),
    Flag("enable_profiler", bool, R, note="profile the model in training"),
    Flag("enable_serialization_as_tensor_content", bool, W, "as_tensor_content"),
    Flag("thread_pool_factory_config_file", str, R, note="use --threads and --queue"),
    Flag("tensorflow_session_config_file", str, R, note="use the separate flags for these settings"),
    Flag("skip_initialize_tpu", bool, N, note="no TPU is initialized"),
    Flag("mixed_precision", str, R, note="choose the precision when the model is exported"),
)


def markdown() -> str:
    """Returns the table of serving/docs/serving.md: a row for each kind of support; flags with equal notes together."""
    rows = ["| here | flags |", "|---|---|"]
    for support in Support:
        names: dict[str, list[str]] = {}
        for flag in FLAGS:
            if flag.support is support:
                names.setdefault(flag.note, []).append(f"`--{flag.name}`")
        cells = [", ".join(flags) + (f": {note}" if note else "") for note, flags in names.items()]
        rows.append(f"| {support.value} | {'; '.join(cells)} |")
    return "\n".join(rows) + "\n"
