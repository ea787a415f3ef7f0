"""What a rank computes with: the threads of TensorFlow where several ranks share the cores of a host, and a device.

By itself TensorFlow takes one thread per core in every process. N ranks on a host then have N threads on each core,
which wait for each other inside every operation and keep the core from the one that is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from keras_ddl import communicator
from keras_ddl.communicator import history
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.topology import Topology


def configure_tensorflow(topology: Topology) -> str:
    """Gives TensorFlow this rank's cores and its device, which is returned. COLLECTIVE."""
    share_cores(topology)
    return choose_device(topology.local_rank)


def share_cores(topology: Topology) -> None:
    """Gives TensorFlow this rank's share of the cores, unless the script or TF_NUM_*OP_THREADS has chosen, or
    TensorFlow has started. COLLECTIVE.
    """
    if topology.size == 1 and not history.takes_newcomers():
        return
    cores = communicator.all_gather_object(tuple(os.sched_getaffinity(0)), name="keras_ddl/cores")
    threads = threads_of(topology.rank, topology.hosts, cores)
    if threads is None:
        return
    _set("intra", threads)
    # Each synchronous kernel keeps a thread while it waits for other ranks: too few, and all wait.
    if tf_compat.asynchronous():
        # Two at least: with one, a weight's gradient may wait until all of backward is done, and its bucket with it.
        _set("inter", max(2, threads))


def threads_of(rank: int, hosts: Sequence[int], cores: Sequence[Sequence[int]]) -> int | None:
    """Returns the threads for `rank`: its cores divided by the ranks that may use one of them; None if it is alone.

    Args:
        hosts: index of the host of each rank. cores: numbers of the cores that each rank may run on.
    """
    own = set(cores[rank])
    sharers = sum(host == hosts[rank] and not own.isdisjoint(theirs) for host, theirs in zip(hosts, cores))
    return None if sharers == 1 else max(1, len(own) // sharers)


def _set(pool: str, threads: int) -> None:
    chosen = getattr(tf.config.threading, f"get_{pool}_op_parallelism_threads")()
    if chosen or os.environ.get(f"TF_NUM_{pool.upper()}OP_THREADS"):
        return
    try:
        getattr(tf.config.threading, f"set_{pool}_op_parallelism_threads")(threads)
    except RuntimeError:
        pass  # TensorFlow has started already, with one per core


def choose_device(local_rank: int) -> str:
    """Returns this rank's device: the GPU numbered local_rank when there are GPUs, else the CPU."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "/device:CPU:0"
    number = local_rank % len(gpus)
    try:
        # Else every rank would take memory on every GPU.
        tf.config.set_visible_devices(gpus[number], "GPU")
        number = 0
    except RuntimeError:
        pass  # TensorFlow has started already: all GPUs are visible
    return f"/device:GPU:{number}"
