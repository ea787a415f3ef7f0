"""Kills a rank under keras_ddl and under torchft, and compares how soon the others continue and what is lost.

    pip install torchft      # 0.2; needs PyTorch
    python benchmarks/survival_peers.py --kills 5

Three ranks on this host train a network of dense layers in float64 with Adam. SIGKILL kills one of them at a random
moment of a random step. Contestants take turns:

    fit      Keras under keras_ddl.Strategy, `keras-ddl run -np MIN:MAX`
    ddl      PyTorch, DistributedDataParallel on backend "ddl", `keras-ddl run -np MIN:MAX`; the program regroups
    torchft  PyTorch, torchft's Manager and Optimizer on gloo, three replica groups of one process, and a lighthouse; a
             loop as in its example train_ddp.py, in which each group takes its rows of a batch. Manager.allreduce sums
             the gradients, because DistributedDataParallel of torchft 0.2.0 with PyTorch 2.13 fails when a rank is lost

seconds = from the kill until the lowest remaining rank has taken the next step without the lost rank; steps lost =
batches that changed no weight; differs = the largest difference of a final weight to that of one process on whole
batches, relative to the largest weight.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from _smoke import options_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
CONTESTANTS = ("fit", "ddl", "torchft")
RANKS, ROWS, WIDTH, STEPS, FIRST_STEPS = 3, 96, 512, 60, 10
HERE = Path(__file__).resolve()


def batches() -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs [STEPS * ROWS, WIDTH] and targets [STEPS * ROWS, 1]."""
    x = np.random.default_rng(0).normal(size=(STEPS * ROWS, WIDTH))
    return x, np.tanh(x).mean(1, keepdims=True)


class Watch:
    """Kills this rank as planned, or records when it has continued without the killed rank.

    plan: (rank, step, fraction of the step that is over); None: nobody is killed.
    """

    def __init__(self, rank: int, plan: tuple[int, int, float] | None) -> None:
        self.rank, self.plan = rank, plan
        self.continued_at: float | None = None
        self.lost = 0
        self._lasted = 0.0

    def begin(self, step: int) -> None:
        self._begun = time.monotonic()
        if self.plan is not None and self.plan[:2] == (self.rank, step):
            threading.Timer(self.plan[2] * self._lasted, self._die).start()

    def end(self, step: int, size: int) -> None:
        """Called when `size` ranks have taken a step."""
        self._lasted = time.monotonic() - self._begun
        if self.plan is not None and self.plan[0] == self.rank and step > self.plan[1]:
            time.sleep(60)  # the timer is late
        if self.continued_at is None and size < RANKS and Path("killed").exists():
            self.continued_at = time.monotonic()

    def _die(self) -> None:
        Path("killed").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def report(self, weights: np.ndarray) -> None:
        """Writes the measurements and weights of the lowest remaining rank."""
        if self.plan is not None and self.rank == (self.plan[0] == 0):
            assert self.continued_at is not None, "nobody was lost"
            seen = {"seconds": self.continued_at - float(Path("killed").read_text()), "lost": self.lost}
            np.save("weights.npy", weights)
            Path("seen").write_text(json.dumps(seen))
        elif self.plan is None:
            np.save("weights.npy", weights)


# ---- contestants: the program of one rank


def fit(plan: tuple[int, int, float] | None) -> None:
    import keras
    import tensorflow as tf

    import keras_ddl

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    strategy, (x, y) = keras_ddl.Strategy(seed=0), batches()
    watch = Watch(strategy.rank, plan)

    class Callback(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            watch.begin(batch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            watch.end(batch, strategy.size)

    dense = keras.layers.Dense
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((WIDTH,)), dense(WIDTH, activation="tanh"), dense(WIDTH, activation="tanh"), dense(1)]
        )
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0, callbacks=[Callback()])
    watch.lost = STEPS - int(model.optimizer.iterations.numpy())
    watch.report(np.concatenate([each.ravel() for each in model.get_weights()]))


def torch_model() -> tuple[Any, Any]:
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    module = torch.nn.Sequential(linear(WIDTH, WIDTH), tanh(), linear(WIDTH, WIDTH), tanh(), linear(WIDTH, 1))
    return module, torch.optim.Adam(module.parameters(), 1e-3)


def torch_rows(step: int, rank: int, size: int) -> tuple[Any, Any]:
    import torch

    rows = slice(step * ROWS + rank, (step + 1) * ROWS, size)
    x, y = _torch_data or _torch_data.extend(map(torch.from_numpy, batches())) or _torch_data
    return x[rows], y[rows]


_torch_data: list[Any] = []


def torch_weights(module: Any) -> np.ndarray:
    return np.concatenate([each.detach().numpy().ravel() for each in module.parameters()])


def ddl(plan: tuple[int, int, float] | None) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import keras_ddl
    import keras_ddl.torch

    dist.init_process_group("ddl")
    module, optimizer = torch_model()
    watch, step, model = Watch(dist.get_rank(), plan), 0, DistributedDataParallel(module)
    while step < STEPS:
        try:
            if model is None:
                keras_ddl.regroup()
                dist.init_process_group("ddl")
                steps: list[int] = [0] * dist.get_world_size()
                dist.all_gather_object(steps, step)
                state = [(step, module.state_dict(), optimizer.state_dict())]
                dist.broadcast_object_list(state, steps.index(max(steps)))
                step = state[0][0]
                module.load_state_dict(state[0][1])
                optimizer.load_state_dict(state[0][2])
                model = DistributedDataParallel(module)
                continue
            watch.begin(step)
            x, y = torch_rows(step, dist.get_rank(), dist.get_world_size())
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            watch.end(step, dist.get_world_size())
            step += 1
        except RuntimeError as error:
            if keras_ddl.errors.lost_rank_behind(error) is None:
                raise
            if dist.is_initialized():
                dist.destroy_process_group()
            model = None
    watch.report(torch_weights(module))


def torchft(plan: tuple[int, int, float] | None) -> None:
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["GROUP"])
    module, plain = torch_model()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=lambda state: (module.load_state_dict(state["model"]), plain.load_state_dict(state["optim"])),
        state_dict=lambda: {"model": module.state_dict(), "optim": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"group_{rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    optimizer, watch, parameters = Optimizer(manager, plain), Watch(rank, plan), list(module.parameters())
    Path(f"ready-{rank}").touch()
    while len(list(Path().glob("ready-*"))) < RANKS:  # otherwise the first would train alone
        time.sleep(0.01)
    time.sleep(1)  # until the lighthouse knows all groups, and waits for them
    for step in range(STEPS):
        watch.begin(step)
        optimizer.zero_grad()
        x, y = torch_rows(step, rank, RANKS)
        torch.nn.functional.mse_loss(module(x), y).backward()
        gradients = torch.cat([each.grad.ravel() for each in parameters])
        manager.allreduce(gradients).wait()
        for each, gradient in zip(parameters, gradients.split([each.numel() for each in parameters])):
            each.grad = gradient.view_as(each)
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            watch.end(step, manager.num_participants())
        else:
            watch.lost += 1
    watch.report(torch_weights(module))
    manager.shutdown(wait=False)


def lighthouse(times: dict[str, int]) -> None:
    """Serves until it is killed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("[::]:0", min_replicas=1, **times)
    Path("address.part").write_text(server.address())
    Path("address.part").rename("address")
    time.sleep(3600)


def alone() -> None:
    """Trains one PyTorch process on whole batches."""
    import torch

    module, optimizer = torch_model()
    for step in range(STEPS):
        x, y = torch_rows(step, 0, 1)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    Watch(0, None).report(torch_weights(module))


# ---- starts the ranks


def run(command: list[str], folder: Path, **env: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts a process; returns it and its output file."""
    number, path = tempfile.mkstemp(dir=folder, suffix=".output")
    with os.fdopen(number) as output:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT)
    return process, Path(path)


def finish(
    started: list[tuple[subprocess.Popen[bytes], Path]], killed: int | None = None, seconds: float = 300
) -> None:
    """Waits for all processes. If one fails, ends the others and this program. `killed`: the one that SIGKILL ends."""
    latest, left = time.monotonic() + seconds, dict(enumerate(started))
    try:
        while left:
            for number, (process, output) in list(left.items()):
                if process.poll() is None:
                    continue
                del left[number]
                if process.returncode and (number, process.returncode) != (killed, -signal.SIGKILL):
                    sys.exit(f"{process.args} ended with {process.returncode}:\n{output.read_text()[-4000:]}")
            if time.monotonic() > latest:
                sys.exit(f"{len(left)} processes did not end in {seconds:g} s")
            time.sleep(0.05)
    finally:
        for process, _ in left.values():
            process.kill()
            process.wait()


def lose(contestant: str, plan: tuple[int, int, float], options: argparse.Namespace) -> tuple[dict, np.ndarray]:
    """Runs a contestant that loses a rank; returns the measurements and the final weights."""
    this = [sys.executable, str(HERE), "--in-rank", contestant, json.dumps(plan)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if contestant == "torchft":
            times = {"join_timeout_ms": options.join_timeout_ms, "heartbeat_timeout_ms": options.heartbeat_ms}
            house = [sys.executable, str(HERE), "--in-rank", "lighthouse", json.dumps(times | {"quorum_tick_ms": 100})]
            server = subprocess.Popen(house, cwd=folder, stdout=subprocess.DEVNULL)
            try:
                while not (folder / "address").exists():
                    assert server.poll() is None, "the lighthouse has ended"
                    time.sleep(0.05)
                env = {"TORCHFT_LIGHTHOUSE": (folder / "address").read_text()}
                finish([run(this, folder, GROUP=str(rank), **env) for rank in range(RANKS)], killed=plan[0])
            finally:
                server.kill()
                server.wait()
        else:
            job = [sys.executable, "-m", "keras_ddl.cli", "run", "-np", f"1:{RANKS}", *this]
            finish([run(job, folder)])
        return json.loads((folder / "seen").read_text()), np.load(folder / "weights.npy")


def one_process_weights(contestant: str) -> np.ndarray:
    """Returns the final weights of one process with Keras or PyTorch."""
    with tempfile.TemporaryDirectory() as name:
        what = "fit" if contestant == "fit" else "alone"
        finish([run([sys.executable, str(HERE), "--in-rank", what, "null"], Path(name))])
        return np.load(Path(name) / "weights.npy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="(default: all)")
    parser.add_argument("--kills", type=int, default=5, help="kills of each contestant (default: 5)")
    parser.add_argument("--first-victim", type=int, default=0, help="the lowest rank that may be killed (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed for victims and moments (default: 0)")
    parser.add_argument(
        "--join-timeout-ms", type=int, default=10000, help="join timeout of torchft's lighthouse (default: 10000)"
    )
    parser.add_argument(
        "--heartbeat-ms", type=int, default=5000, help="heartbeat timeout of the lighthouse (default: 5000)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all measurements here")
    parser.add_argument("--in-rank", nargs=2, help=argparse.SUPPRESS)
    options = options_of(parser, contestants="fit,ddl", kills=1)
    if options.in_rank:
        what, chosen = options.in_rank[0], json.loads(options.in_rank[1])
        programs: dict[str, Callable[[Any], None]] = {"fit": fit, "ddl": ddl, "torchft": torchft}
        if what in programs:
            programs[what](chosen and (chosen[0], chosen[1], chosen[2]))
        elif what == "lighthouse":
            lighthouse(chosen)
        else:
            alone()
        return
    contestants = options.contestants.split(",")
    if unknown := set(contestants) - set(CONTESTANTS):
        parser.error(f"--contestants: choose from {', '.join(CONTESTANTS)}. Received: {', '.join(sorted(unknown))}")
    rng = random.Random(options.seed)
    expected = {name: one_process_weights(name) for name in contestants}
    result: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for _ in range(options.kills):
        plan = (
            rng.randrange(options.first_victim, RANKS),
            rng.randrange(FIRST_STEPS, STEPS - FIRST_STEPS),
            round(rng.random(), 3),
        )
        for name, seen in result.items():
            one, weights = lose(name, plan, options)
            differs = float(np.abs(weights - expected[name]).max() / np.abs(expected[name]).max())
            seen.append(one | {"differs": differs})
    print(f"{RANKS} ranks on {len(os.sched_getaffinity(0))} cores, {options.kills} kills each\n")
    print(
        f"{'':>9} {'seconds: median':>16} {'worst':>8} {'steps lost: median':>19} {'worst':>6} {'differs: worst':>15}"
    )
    for name, seen in result.items():
        seconds, lost, differs = ([each[what] for each in seen] for what in ("seconds", "lost", "differs"))
        print(
            f"{name:>9} {statistics.median(seconds):>16.2f} {max(seconds):>8.2f} {statistics.median(lost):>19.0f} "
            f"{max(lost):>6.0f} {max(differs):>15.1e}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
