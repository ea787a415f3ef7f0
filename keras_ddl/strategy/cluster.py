"""The words of TensorFlow's clusters: who a rank is there, and what their strategies' arguments mean here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.topology import Topology, tf_config

# Arguments of MultiWorkerMirroredStrategy and MirroredStrategy.
_NOT_CHOSEN_IN_THE_SCRIPT = ("cluster_resolver", "devices", "cross_device_ops", "communication")


def resolver(topology: Topology) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    """Returns the cluster of all ranks and this rank's task in it. Rank 0 is the chief, whichever way a script asks.

    The tasks are those of TF_CONFIG where it names as many that train as there are ranks. Otherwise every rank is a
    worker; the cluster then has a name for each in place of an address, because ranks do not meet at addresses.
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


def check_arguments(mode: Any, unsupported_tf_args: Mapping[str, Any]) -> None:
    """Checks the arguments of Strategy(), whose line may have been that of another strategy.

    Raises: ConfigError: an argument with which TensorFlow's strategies choose processes or devices. TypeError: one that
        no strategy takes.
    """
    passed = {name: value for name, value in unsupported_tf_args.items() if value is not None}
    if mode is not None and not isinstance(mode, str):
        passed = {"mode": mode, **passed}
    for name, value in passed.items():
        if name != "mode" and name not in _NOT_CHOSEN_IN_THE_SCRIPT:
            raise TypeError(f"Strategy() got an unexpected keyword argument {name!r}")
        raise ConfigError(
            "Strategy: processes, devices and their communication are chosen when the job is launched, not in the "
            f"script. Received: {name}={value!r}. Leave it out, and start the script with `keras-ddl run -np N`, "
            "`--hosts h0:2,h1:2` or `--tf-config`: one rank for each GPU."
        )


def bucket_bytes_of(options: Any, rank: int) -> int | None:
    """Returns the bound on a bucket that a tf.distribute.experimental.CommunicationOptions asks for; None for none.

    Its `implementation` is ignored: there is one. Raises: ConfigError: it is another thing, or has a timeout.
    """
    if options is None:
        return None
    if not hasattr(options, "bytes_per_pack"):
        raise ConfigError(
            "Strategy: communication_options must be a tf.distribute.experimental.CommunicationOptions. Received: "
            f"{options!r} (rank {rank}). Leave it out."
        )
    if options.timeout_seconds is not None:
        raise ConfigError(
            "Strategy: how long a collective may wait is set where ranks are started. Received: communication_options "
            f"with timeout_seconds={options.timeout_seconds:g} (rank {rank}). Leave it out, and set "
            f"KERAS_DDL_DEADLINE_SECONDS={options.timeout_seconds:g} for `keras-ddl run`."
        )
    return options.bytes_per_pack or None


@functools.cache
def refuse_preemption_handlers() -> None:
    """From now on making a PreemptionCheckpointHandler is an error that says what takes its place.

    Left to itself it fails in a thread of its own, at some time, and does not say what it lacks.
    """
    handler = tf.distribute.experimental.PreemptionCheckpointHandler
    original = handler.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not communicator.is_initialized() or communicator.size() == 1:
            original(self, *args, **kwargs)
            return
        raise ConfigError(
            "A PreemptionCheckpointHandler needs the coordination service that TensorFlow's own clusters have. "
            f"Received: one on rank {communicator.rank()} of {communicator.size()}. In fit use "
            "keras_ddl.callbacks.Checkpoint(folder, resume=True), in a loop of your own a tf.train.CheckpointManager "
            "on rank 0, and start the job again after it has been stopped."
        )

    handler.__init__ = __init__
