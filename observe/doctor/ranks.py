"""Runs checks that need ranks: every collective is right, a small training works, and hosts are alike."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_ddl import communicator, packages
from keras_ddl.communicator.transports import mpi
from keras_ddl.doctor import host
from keras_ddl.launch.checks import gpus, host_facts
from keras_ddl.launch.checks.finding import Finding, Severity, merged
from keras_ddl.packages import nvidia_driver

_ROWS = 64


def everything(directory: str) -> tuple[list[Finding], int]:
    """Returns (findings of all hosts and ranks, worst first; number of hosts), equal on all ranks. COLLECTIVE."""
    communicator.init()
    name = socket.gethostname()
    own = host.check(directory) if communicator.local_rank() == 0 else []
    findings_by_rank = communicator.all_gather_object(
        [dataclasses.replace(each, host=name) for each in own], "doctor/host"
    )
    findings = [each for rank_findings in findings_by_rank for each in rank_findings]
    from keras_ddl.compat import gpu_stream
    from keras_ddl.device import configure_tensorflow, path_of_tensors  # imports TensorFlow

    device = configure_tensorflow(communicator.topology())  # before anything starts TensorFlow
    if "GPU" in device:
        severity = Severity.OK if gpu_stream.is_loaded() else Severity.NOTE
        findings.append(Finding(severity, "tensors on GPUs", path_of_tensors()))
    findings += compare(communicator.all_gather_object(facts(), "doctor/facts"))
    findings += compare_gpus(communicator.all_gather_object((name, *gpu(device)), "doctor/gpus"))
    findings += transport()
    if communicator.size() > 1:
        findings += collectives()
    findings += training()
    findings = communicator.broadcast_object(findings, name="doctor/findings")
    return merged(findings, communicator.num_hosts()), communicator.num_hosts()


def facts() -> dict[str, Any]:
    """Returns this rank's facts to be compared."""
    import keras
    import tensorflow as tf

    return {
        "host": socket.gethostname(),
        "keras_ddl": packages.version("keras_ddl"),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "Python": platform.python_version(),
        "MPI": _mpi_library(),
        "cores": sorted(os.sched_getaffinity(0)),
        **clock(),
    }


def gpu(device: str) -> tuple[str, str, Finding | None]:
    """Returns the name of this rank's GPU, its unique id, and a finding if TensorFlow cannot use it.

    Args:
        device: the result of `configure_tensorflow`.
    """
    names = gpus.names_in_tensorflow()
    found = gpus.check_tensorflow(names)
    if "GPU" not in device:
        return "", "", found
    import tensorflow as tf

    own = tf.config.get_visible_devices("GPU")[int(device.rpartition(":")[2])]
    number = int(own.name.rpartition(":")[2])
    return f"GPU {number} ({names[number]})", nvidia_driver.identity_of(number), found


def clock() -> dict[str, float]:
    """Returns this host's "offset" and "offset_error" (host_facts.clock_offset). COLLECTIVE.

    `keras-ddl run` on several hosts has measured it; under other launchers it is relative to the end of a barrier.
    """
    measured = host_facts.measured_clock()
    communicator.barrier("doctor/clocks")
    now = time.time()
    is_known = np.array(measured is not None, np.int32)
    known = communicator.all_reduce_array(is_known, op="min", name="doctor/clocks_known")
    if measured is not None and known:
        return measured
    return {"offset": now, "offset_error": 0.0}


def compare(facts_by_rank: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yields the findings from comparing the ranks' facts: versions, clocks, cores."""
    yield from host_facts.compare_versions(facts_by_rank, (*host_facts.VERSIONS, "MPI"))
    yield from host_facts.compare_clocks(facts_by_rank)
    hosts: dict[str, list[set[int]]] = {}
    for rank_facts in facts_by_rank:
        hosts.setdefault(rank_facts["host"], []).append(set(rank_facts["cores"]))
    for where, cores in hosts.items():
        usable = len(set().union(*cores))
        if len(cores) > usable:
            remedy = f"Start at most {usable} rank(s) there: ranks that share a core wait for each other."
            yield Finding(Severity.WARNING, "cores", f"{len(cores)} ranks on {usable} core(s)", remedy, where)
        elif len(cores) > 1 and any(len(one) == 1 for one in cores):
            remedy = "All threads of a rank share that core: use `keras-ddl run`, or mpirun --bind-to none."
            yield Finding(Severity.WARNING, "cores", "ranks are bound to one core each", remedy, where)


def compare_gpus(gpus_by_rank: list[tuple[str, str, str, Finding | None]]) -> Iterator[Finding]:
    """Yields findings about the ranks' GPUs: the GPU of each rank, and problems.

    gpus_by_rank: each rank's host, followed by the result of `gpu`.
    """
    for where in dict.fromkeys(each for each, *_ in gpus_by_rank):
        here = {rank: each[1:] for rank, each in enumerate(gpus_by_rank) if each[0] == where}
        yield from dict.fromkeys(dataclasses.replace(found, host=where) for _, _, found in here.values() if found)
        if not any(name for name, _, _ in here.values()):
            continue
        listed = ", ".join(f"rank {rank}: {name or 'none'}" for rank, (name, _, _) in here.items())
        if len({key for _, key, _ in here.values()}) == len(here):
            yield Finding(Severity.OK, "GPUs of ranks", listed, "", where)
        else:
            remedy = "Start one rank for each GPU: ranks that share one compute in turn and divide its memory."
            yield Finding(Severity.WARNING, "GPUs of ranks", listed, remedy, where)


def collectives() -> Iterator[Finding]:
    """Runs each collective once and checks its result. COLLECTIVE; findings are equal on all ranks."""
    import tensorflow as tf

    from keras_ddl import ops

    rank, size = communicator.rank(), communicator.size()
    ranks = np.arange(size)
    sum_of_ranks = float(ranks.sum())

    def all_reduces() -> bool:
        right = True
        for dtype in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8"):
            for elements in (1, 1000, 300_001):
                got = ops.all_reduce(tf.cast(tf.fill([elements], rank % 5), dtype))
                wanted = sum(each % 5 for each in range(size))
                right = right and bool(np.all(np.asarray(tf.cast(got, tf.float64)) == wanted))
        for op, number in (("min", 0), ("max", size - 1), ("mean", sum_of_ranks / size)):
            got = ops.all_reduce(tf.fill([1001], float(rank)), op=op)
            right = right and bool(np.allclose(got, number, rtol=1e-6))
        return right

    def broadcasts() -> bool:
        got = [ops.broadcast(tf.fill([70_000], rank), root=root) for root in (0, size - 1)]
        return bool(np.all(got[0] == 0) and np.all(got[1] == size - 1))

    def all_gathers() -> bool:
        got = ops.all_gather(tf.fill([rank + 1, 3], rank))
        return np.array_equal(got, np.repeat(ranks, ranks + 1)[:, None] * np.ones(3, int))

    def reduce_scatters() -> bool:
        rows = 2 * size
        got = ops.reduce_scatter(tf.cast(tf.reshape(tf.range(rows * 4), [rows, 4]), tf.float32) + rank)
        total = size * np.arange(rows * 4).reshape(rows, 4) + sum_of_ranks
        return bool(np.array_equal(got, total[2 * rank : 2 * rank + 2]))

    def all_to_alls() -> bool:
        got = ops.all_to_all(tf.constant(rank * size + ranks))
        got = got[0] if isinstance(got, tuple) else got
        return bool(np.array_equal(got, ranks * size + rank))

    def objects() -> bool:
        return communicator.all_gather_object({"rank": rank}) == [{"rank": each} for each in range(size)]

    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("all_reduce", all_reduces),
        ("broadcast", broadcasts),
        ("all_gather", all_gathers),
        ("reduce_scatter", reduce_scatters),
        ("all_to_all", all_to_alls),
        ("objects", objects),
    )
    for name, check in checks:
        start = time.perf_counter()
        right = communicator.all_gather_object(check(), f"doctor/{name}")
        wrong = [each for each, fine in enumerate(right) if not fine]
        if wrong:
            remedy = (
                "The memory or network is faulty, or keras_ddl or MPI has a bug: please report it with this output."
            )
            yield Finding(Severity.ERROR, name, f"wrong results on rank(s) {', '.join(map(str, wrong))}", remedy)
        else:
            yield Finding(Severity.OK, name, f"right on {size} ranks ({time.perf_counter() - start:.2f} s)")


def training() -> Iterator[Finding]:
    """Trains a small network for some steps, and compares the ranks' weights. COLLECTIVE."""
    import keras

    from keras_ddl.strategy import Strategy

    keras.utils.set_random_seed(1)
    start = time.perf_counter()
    strategy = Strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.02), "mse")
    x = np.random.default_rng(0).normal(size=(_ROWS * communicator.size(), 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    history = model.fit(x, y, batch_size=len(x) // 2, epochs=20, verbose=0).history["loss"]
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    weights_by_rank = communicator.all_gather_object(weights, "doctor/weights")
    remedy = "Run the command again; if the error stays, please report it with this output."
    if any(each != weights_by_rank[0] for each in weights_by_rank):
        yield Finding(Severity.ERROR, "training", "the ranks ended with different weights", remedy)
    elif not history[-1] < 0.5 * history[0]:
        yield Finding(
            Severity.ERROR, "training", f"the loss did not fall: {history[0]:.3g} to {history[-1]:.3g}", remedy
        )
    else:
        seconds = time.perf_counter() - start
        result = f"40 steps, loss {history[0]:.3g} to {history[-1]:.3g}, weights bitwise equal ({seconds:.1f} s)"
        yield Finding(Severity.OK, "training", result)


def transport() -> Iterator[Finding]:
    """Yields findings about the mechanisms that the communicator's engine uses, and those it cannot use."""
    described = communicator.describe()
    yield Finding(Severity.OK, "engine", described)
    if communicator.local_size() > 1 and "cross memory attach" not in described:
        remedy = (
            "Large all-reduces took up to 1.6 times as long without it. It needs kernel.yama.ptrace_scope=0, in "
            "containers also --cap-add SYS_PTRACE, and one user for all ranks. KERAS_DDL_CMA=0 switches it off."
        )
        status = f"not available; kernel.yama.ptrace_scope is {_yama()}"
        yield Finding(Severity.NOTE, "cross memory attach", status, remedy)
    if mpi.running():
        yield thread_level()


def thread_level() -> Finding:
    """Checks MPI's thread level, because keras_ddl's threads call MPI while the program's threads do."""
    from mpi4py import MPI

    levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    level = f"MPI_THREAD_{levels[MPI.Query_thread()]}"
    if level == "MPI_THREAD_MULTIPLE":
        return Finding(Severity.OK, "MPI threads", level)
    remedy = "keras_ddl needs MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level alone, or build MPI with it."
    return Finding(Severity.ERROR, "MPI threads", level, remedy)


def _yama() -> str:
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return "missing"


def _mpi_library() -> str:
    if not mpi.running():
        return "none: one host"
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
