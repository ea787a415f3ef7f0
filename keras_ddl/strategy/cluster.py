"""Translates the terms of TensorFlow's clusters: a rank's task, and the arguments of TensorFlow's strategies."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat import replacing
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.topology import Topology, tf_config

# Arguments of MultiWorkerMirroredStrategy and MirroredStrategy.
_NOT_CHOSEN_IN_THE_SCRIPT = ("cluster_resolver", "devices", "cross_device_ops", "communication")

# Arguments of earlier versions -> their replacement.
_REPLACED = {
    "mode": "an argument of keras_ddl.init, the variable KERAS_DDL_MODE, or `keras-ddl run --mode`",
    "bucket_bytes": "the variable KERAS_DDL_BUCKET_BYTES",
    "communication_options": "left out: KERAS_DDL_BUCKET_BYTES bounds what one collective sends, and "
    "KERAS_DDL_DEADLINE_SECONDS how long it may wait",
    "drift_check_percent": "the variable KERAS_DDL_DRIFT_CHECK_PERCENT",
    "sparse_as_dense": "left out: gradients of embedding tables travel as the rows that occurred",
    "min_ranks": "the lower number of `keras-ddl run -np MIN:MAX`",
    "shard_optimizer": 'sharding="optimizer"',
    "shard_weights": 'sharding="weights"',
    "layout_map": "layout, which takes a LayoutMap",
    "model_parallel": "layout, which also takes a number of model ranks",
    "data": "reader",
}


def resolver(topology: Topology) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    """Returns the cluster of all ranks and this rank's task in it. TensorFlow's ways to find the chief all give rank 0.

    The tasks are those of TF_CONFIG if it names as many training tasks as there are ranks. Otherwise every rank is a
    worker, with a name instead of an address, because ranks do not connect by addresses of the cluster.
    """
    cluster = tf_config.read()
    if topology.size == 1 and cluster.own is not None and cluster.own.type == "evaluator":
        addresses, task = cluster.addresses, cluster.own
    elif len(cluster.tasks) == topology.size:
        addresses, task = cluster.addresses, cluster.tasks[topology.rank]
    else:
        addresses = {"worker": [f"host{host}-rank{rank}" for rank, host in enumerate(topology.hosts)]}
        task = tf_config.Task("worker", topology.rank, None)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(addresses), task_type=task.type, task_id=task.index, rpc_layer="grpc"
    )


def check_arguments(positional: Sequence[Any], removed: Mapping[str, Any]) -> None:
    """Refuses arguments that Strategy() does not take, which may come from another strategy or an earlier version.

    Raises: ConfigError: an argument of TensorFlow's strategies or of earlier versions; it names the replacement.
        TypeError: an argument that no strategy takes.
    """
    if positional:  # earlier versions took a mode; MirroredStrategy takes devices
        removed = {"mode" if isinstance(positional[0], str) else "devices": positional[0], **removed}
    for name, value in removed.items():
        if name in _REPLACED:
            raise ConfigError(f"Strategy: {name} is now {_REPLACED[name]}. Received: {name}={value!r}.")
        if name not in _NOT_CHOSEN_IN_THE_SCRIPT:
            raise TypeError(f"Strategy() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ConfigError(
                "Strategy: processes, devices and their communication are chosen when the job is launched, not in the "
                f"script. Received: {name}={value!r}. Leave it out, and start the script with `keras-ddl run -np N`, "
                "`--hosts h0:2,h1:2` or `--tf-config`: one rank for each GPU."
            )


@functools.cache
def refuse_preemption_handlers() -> None:
    """Makes creating a PreemptionCheckpointHandler raise an error that names its replacement.

    Otherwise the handler would fail later, in its own thread, with an obscure error.
    """
    replacing.replace([(tf.distribute.experimental.PreemptionCheckpointHandler, "__init__", _refuse)])


def _refuse(original: Any, *args: Any, **kwargs: Any) -> None:
    if not communicator.is_initialized() or communicator.size() == 1:
        original(*args, **kwargs)
        return
    raise ConfigError(
        "A PreemptionCheckpointHandler needs the coordination service that TensorFlow's own clusters have. "
        f"Received: a PreemptionCheckpointHandler on rank {communicator.rank()} of {communicator.size()}. With fit, "
        "use keras_ddl.callbacks.Checkpoint(folder, resume=True); in a training loop of your own, use "
        "tf.train.CheckpointManager on rank 0. Then start the job again after it was stopped."
    )
