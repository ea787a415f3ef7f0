"""Horovod's interface on top of keras_ddl: `import keras_ddl.horovod as hvd`.

It replaces `horovod.tensorflow`. After `install()`, or with `keras-ddl run --as-horovod`, unchanged imports of Horovod
find it. Like Horovod, it works without a Strategy. It only translates names; keras_ddl's own functions do the work.
integrations/horovod/docs/from-horovod.md lists the differences from Horovod.
"""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> its module in this folder, which is imported when the name is first used.
_HOME_OF = {
    **dict.fromkeys(
        (
            *("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size"),
            *("cross_rank", "cross_size", "is_homogeneous", "mpi_threads_supported", "start_timeline", "stop_timeline"),
            *("mpi_built", "mpi_enabled", "gloo_built", "gloo_enabled", "nccl_built", "cuda_built", "rocm_built"),
            *("ddl_built", "ccl_built", "Average", "Sum", "Min", "Max", "Product", "Adasum"),
        ),
        "basics",
    ),
    **dict.fromkeys(("rank_op", "size_op", "local_rank_op", "local_size_op", "process_set_included_op"), "rank_ops"),
    **dict.fromkeys(
        (
            *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "broadcast_"),
            *("broadcast_variables", "broadcast_global_variables", "reducescatter", "grouped_reducescatter"),
            *("alltoall", "join"),
        ),
        "collectives",
    ),
    **dict.fromkeys(("broadcast_object", "broadcast_object_fn", "allgather_object"), "objects"),
    "BroadcastGlobalVariablesHook": "hooks",
    "Compression": "compression",
    **dict.fromkeys(("ProcessSet", "add_process_set", "remove_process_set", "global_process_set"), "process_sets"),
    "install": "installation",
    **dict.fromkeys(("DistributedOptimizer", "PartialDistributedOptimizer"), "optimizer"),
    **dict.fromkeys(("DistributedGradientTape", "PartialDistributedGradientTape"), "tape"),
    "SyncBatchNormalization": "sync_batch_normalization",
    "run": "running",
}
# Modules of this folder that are also attributes, such as hvd.compression.
_MODULES = ("callbacks", "compression", "elastic", "keras", "keras_elastic")

# Names of Horovod that are missing here -> what to use instead.
_ABSENT = {
    "mlsl_built": "Horovod renamed it. Use ccl_built.",
    "check_num_rank_power_of_2": "Adasum takes any number of ranks here.",
    "handle_average_backwards_compatibility": "The functions with average= handle it.",
    "gpu_available": "Use tf.config.list_physical_devices('GPU').",
    **dict.fromkeys(
        (
            *("LocalGradientAggregationHelper", "check_extension", "is_version_greater_equal_than", "refs_to_vars"),
            *("split_list", "vars_to_refs"),
        ),
        "It is internal to Horovod.",
    ),
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _ABSENT:
        raise AttributeError(f"keras_ddl.horovod has no {name}. {_ABSENT[name]}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}. For all names see "
        f"integrations/horovod/docs/from-horovod.md and dir({__name__})."
    )


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
