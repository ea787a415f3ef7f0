"""Chooses a rank's device, and divides a host's cores between its ranks as threads of TensorFlow.

By default TensorFlow starts one thread per core in every process. N ranks on a host then have N threads on each core,
which wait for each other inside every operation and take the core from the thread that they wait for.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

from keras_ddl import communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import gpu_stream
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.device import sessions
from keras_ddl.errors import DependencyError
from keras_ddl.packages import nvidia_driver
from keras_ddl.topology import Topology


def configure_tensorflow(topology: Topology) -> str:
    """Gives TensorFlow, and sessions of tf.compat.v1, this rank's cores and device. COLLECTIVE.

    Returns: the device.
    """
    share_cores(topology)
    return choose_device(topology)


def share_cores(topology: Topology) -> None:
    """Gives TensorFlow this rank's share of the cores, unless TF_NUM_*OP_THREADS or the script has chosen.

    COLLECTIVE. Does nothing if TensorFlow has started.
    """
    sessions.install()
    if topology.size == 1 and not history.takes_newcomers():
        return
    cores = communicator.all_gather_object(tuple(os.sched_getaffinity(0)), name="keras_ddl/cores")
    threads = threads_of(topology.rank, topology.hosts, cores)
    if threads is None:
        return
    _set("intra", threads)
    # A synchronous kernel blocks a thread while it waits for other ranks, so too few threads could all be blocked.
    if tf_compat.asynchronous():
        # At least two threads: with one, a gradient and its bucket may wait until the backward pass has ended.
        _set("inter", max(2, threads))


def threads_of(rank: int, hosts: Sequence[int], cores: Sequence[Sequence[int]]) -> int | None:
    """Returns the thread count for `rank`: its cores divided by the ranks that share any of them; None without sharing.

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
        pass  # TensorFlow has already started, with one thread per core


def choose_device(topology: Topology) -> str:
    """Returns this rank's device: the GPU numbered local_rank when there are GPUs, else the CPU. COLLECTIVE.

    From now on collectives take tensors on the GPU where they are, if all ranks can (`path_of_tensors`). Ranks that
    share a GPU allocate its memory as they need it. Warns if TensorFlow has started and forbids this.
    """
    visible = tf.config.get_visible_devices("GPU")
    number = topology.local_rank % len(visible) if visible else 0
    own = visible[number] if visible else None
    hindrance = "" if own else f"rank {topology.rank} has no GPU"
    if own is not None:
        try:
            # Otherwise, every rank would allocate memory on every GPU.
            tf.config.set_visible_devices(own, "GPU")
            number = 0
        except RuntimeError:
            hindrance = f"TensorFlow had started on rank {topology.rank}, with several GPUs"
            stack_position.warn(
                f"TensorFlow had started before keras_ddl could give it one GPU. Rank {topology.rank} computes on GPU "
                f"{number}, but takes memory on all {len(visible)}, and what runs outside the Strategy's scope runs on "
                "GPU 0. Make the Strategy before the script's first operation of TensorFlow.",
                RuntimeWarning,
            )
    sharers = _exchange(own, hindrance, topology)
    if own is None:
        return "/device:CPU:0"
    if len(sharers) > 1:
        _share(own, sharers, topology)
    if not _state.hindrance:
        gpu_stream.load(gpu_stream.build())
        communicator.use_gpu(_ordinal(own))
    return f"/device:GPU:{number}"


class _State:
    hindrance = "there is one rank"  # why collectives do not take tensors on GPUs; "": they do


_state = _State()


def path_of_tensors() -> str:
    """Returns in words whether collectives take tensors on GPUs where they are; if not, why. After `choose_device`."""
    if not _state.hindrance:
        return "collectives take tensors on GPUs"
    return f"TensorFlow copies tensors to the host for collectives, because {_state.hindrance}"


def _hindrance() -> str:
    """Returns why collectives cannot take tensors on this rank's GPU; "": they can."""
    if gpu_stream.is_loaded():
        return ""
    if tf_compat.ops_are_loaded():
        return "collectives ran before the Strategy was made"
    try:
        gpu_stream.build()
    except DependencyError as error:
        return str(error)
    return ""


def _ordinal(gpu: tf.config.PhysicalDevice) -> int:
    return int(gpu.name.rpartition(":")[2])


def _exchange(own: tf.config.PhysicalDevice | None, hindrance: str, topology: Topology) -> list[int]:
    """Agrees on the path of tensors, and returns the ranks that compute on this rank's GPU, itself included.

    COLLECTIVE. Raises: DependencyError: a newcomer cannot use the path that the other ranks use.
    """
    if topology.size == 1 and not history.takes_newcomers():
        return [topology.rank]
    hindrance = hindrance or _hindrance()
    identity = None if own is None else nvidia_driver.identity_of(_ordinal(own))
    facts = communicator.all_gather_object((identity, hindrance), name="keras_ddl/gpus")
    _state.hindrance = next((reason for _, reason in facts if reason), "")
    if hindrance and not _state.hindrance:
        raise DependencyError(
            "A rank that joins a running job must take tensors on its GPU as the other ranks do. Received: "
            f"{hindrance}. Start the job with KERAS_DDL_TF_STREAM=none."
        )
    mine = topology.hosts[topology.rank]
    return [rank for rank, (each, _) in enumerate(facts) if each == identity and topology.hosts[rank] == mine]


def _share(gpu: tf.config.PhysicalDevice, sharers: Sequence[int], topology: Topology) -> None:
    """Lets this rank allocate GPU memory on demand, unless the script has decided; the GPU's first rank warns."""
    how, grows = "each takes memory as it needs it", tf.config.experimental.get_memory_growth(gpu)
    if grows is False or tf.config.get_logical_device_configuration(gpu) is not None:
        how = "each takes memory as the script has set"
    elif grows is None:
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            how = "the first one takes nearly all memory, because TensorFlow had started before keras_ddl"
    if topology.rank == sharers[0]:
        stack_position.warn(
            f"Ranks {', '.join(map(str, sharers))} share a GPU: they compute in turn, and {how}. Start one rank for "
            "each GPU.",
            RuntimeWarning,
        )


def compute_alike(device: str) -> None:
    """Makes TensorFlow's operations give the same bits on every rank's GPU, for computations that ranks repeat.

    Does nothing on a CPU. TensorFlow's fastest kernels for GPUs add in an order that changes from run to run. The
    deterministic ones are slower, and operations that draw random numbers without a seed fail.
    """
    if "GPU" in device:
        _use_deterministic_kernels()


@functools.cache
def _use_deterministic_kernels() -> None:
    tf.config.experimental.enable_op_determinism()
    if communicator.rank() == 0:
        print(
            "keras_ddl: several ranks compute the same part of this step and must get the same bits, so from here on "
            "TensorFlow uses its deterministic kernels, some of which are slower.",
            file=sys.stderr,
            flush=True,
        )
