"""A training of three ranks with checkpoints, in which a fault occurs. Run by failure_table.py.

failing_training.py FOLDER FAULT
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2]
STEP = 12  # the fault occurs after a few checkpoints
CKPT = FOLDER / "ckpt"

import keras  # noqa: E402
import numpy as np  # noqa: E402

import keras_ddl  # noqa: E402
from keras_ddl.compat.tensorflow import tf  # noqa: E402

Strategy = keras_ddl.Strategy  # imported now
if FAULT == "few_files":  # too few are left to connect the ranks
    used = len([*Path("/proc/self/fd").iterdir()]) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
STRATEGY = Strategy()
RANK = STRATEGY.rank


def now() -> None:
    """Stores the time of the fault, on a disk that is never full."""
    (FOLDER / "fault").write_text(str(time.time()))


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass


def between_checkpoints(happens: Callable[[], object]) -> None:
    """Waits for the checkpoint writer, which could free space and keeps the disk busy."""
    while keep._writer.is_busy():
        time.sleep(0.01)
    happens()


def read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def in_child() -> None:
    keras_ddl.barrier()


def start_child(method: str) -> None:
    import multiprocessing

    with multiprocessing.get_context(method).Pool(1) as pool:
        pool.apply(in_child)


def exhaust_address_space() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    np.ones(1 << 27)


def exhaust_memory() -> None:
    held = []
    while True:
        held.append(np.ones(1 << 22))


def raise_in_callback() -> None:
    raise RuntimeError("my callback is wrong")


def kill_ancestor(name: str) -> None:
    pid = os.getppid()
    while pid > 1:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if any(word.endswith(name.encode()) for word in words[:4]):
            os.kill(pid, signal.SIGKILL)
            return
        pid = parent
    raise AssertionError(f"no {name} above this process")


# Fault -> the ranks that it happens to, and the fault itself.
FAULTS: dict[str, tuple[tuple[int, ...], Callable[[], object]]] = {
    "sigkill": ((1,), lambda: signal.raise_signal(signal.SIGKILL)),
    "sigkill_rank_0": ((0,), lambda: signal.raise_signal(signal.SIGKILL)),
    "sigkill_too_few": ((1, 2), lambda: signal.raise_signal(signal.SIGKILL)),
    "pid_namespaces": ((1,), lambda: signal.raise_signal(signal.SIGKILL)),
    "sigstop": ((1,), lambda: signal.raise_signal(signal.SIGSTOP)),
    "exit_0": ((1,), lambda: sys.exit(0)),
    "exit_3": ((1,), lambda: sys.exit(3)),
    "os_exit_0": ((1,), lambda: os._exit(0)),
    "callback": ((1,), raise_in_callback),
    "full_disk": ((0,), lambda: between_checkpoints(lambda: fill(CKPT))),
    "full_shm": ((1,), lambda: fill(Path("/dev/shm"))),
    "read_only_disk": ((0,), lambda: between_checkpoints(lambda: read_only(CKPT))),
    "cgroup_memory": ((1,), exhaust_memory),
    "ulimit_memory": ((1,), exhaust_address_space),
    "fork": ((1,), lambda: start_child("fork")),
    "spawn": ((1,), lambda: start_child("spawn")),
    "launcher_killed": ((1,), lambda: kill_ancestor("keras_ddl.cli")),
    "mpirun_killed": ((1,), lambda: kill_ancestor("prterun")),
}


class Fault(keras.callbacks.Callback):
    never_stops_within_epoch = True

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.02)
        ranks, happens = FAULTS.get(FAULT.removesuffix("_continues").removesuffix("_min_np"), ((), None))
        if self.model.optimizer.iterations == STEP and RANK in ranks:
            now()
            happens()


class Model(keras.Sequential):
    def train_step(self, *args, **kwargs):
        if FAULT == "train_step" and RANK == 1 and keep._saved:
            now()
            raise RuntimeError("my train_step is wrong")
        return super().train_step(*args, **kwargs)


def rows():
    for number in range(4000):
        if FAULT == "generator" and RANK == 1 and number == 8 * STEP:
            now()
            raise KeyError("my generator is wrong")
        yield np.full(6, number % 7, np.float32), np.ones(2, np.float32)


def main() -> None:
    global keep
    if FAULT == "cgroup_memory" and RANK == 1:
        Path(os.environ["TEST_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    keras.utils.set_random_seed(1)
    with STRATEGY.scope():
        model = Model([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    keep = keras_ddl.callbacks.Checkpoint(CKPT, monitor="loss", export_base=False, save_freq=3, keep=2, resume=True)
    spec = (tf.TensorSpec((6,), tf.float32), tf.TensorSpec((2,), tf.float32))
    data = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(8)
    data = data.apply(tf.data.experimental.assert_cardinality(500))
    if FAULT == "train_step":  # traced when a fit begins
        model.fit(data.take(2 * STEP), epochs=1, shuffle=False, verbose=0, callbacks=[keep])
        model.make_train_function(force=True)
    is_short = FAULT.endswith(("_shm", "_continues"))  # harmless faults
    if is_short:
        data = data.take(2 * STEP)
    model.fit(data, epochs=1 if is_short else 20, shuffle=False, verbose=0, callbacks=[Fault(), keep])


if __name__ == "__main__":
    main()
