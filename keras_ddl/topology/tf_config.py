"""Parses TF_CONFIG, which lists the tasks of a TensorFlow cluster, and derives the `keras-ddl run` command for them.

According to TensorFlow's documentation the chief and the workers train; without a chief, worker 0 is the chief. An
evaluator is not in the cluster and evaluates its checkpoints. Parameter servers belong to a different way of training.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl.errors import ConfigError

NAME = "TF_CONFIG"
_TRAINING = ("chief", "worker")
# Programs that run functions that are sent to them: a notebook's kernel, Ray's workers.
_HOSTS_OF_FUNCTIONS = ("ipykernel", "default_worker.py")
_EXAMPLE = '{"cluster": {"worker": ["h0:2222", "h1:2222"]}, "task": {"type": "worker", "index": 0}}'


@dataclass(frozen=True)
class Task:
    """One process of the cluster; `host` is None if the cluster does not list it."""

    type: str
    index: int
    host: str | None

    def __str__(self) -> str:
        return f"{self.type} {self.index}" + (f" on {self.host}" if self.host else "")


@dataclass(frozen=True)
class Cluster:
    """The cluster of a TF_CONFIG.

    Attributes:
        tasks: the training tasks in the order of their ranks: the chief first, then host by host.
        left_out: all other tasks (evaluator, ps).
        own: the task of this process; None if TF_CONFIG has none.
        addresses: type of task -> addresses by index, for tasks that train.
    """

    tasks: tuple[Task, ...] = ()
    left_out: tuple[Task, ...] = ()
    own: Task | None = None
    addresses: Mapping[str, Sequence[str]] | None = None

    @property
    def hosts(self) -> dict[str, int]:
        """Number of tasks by host, in the order of the ranks."""
        hosts: dict[str, int] = {}
        for task in self.tasks:
            assert task.host is not None  # the cluster lists every task that trains
            hosts[task.host] = hosts.get(task.host, 0) + 1
        return hosts

    @property
    def on_this_host_only(self) -> bool:
        """Whether all tasks that train are on the host of this process."""
        return set(self.hosts) <= {"localhost"} or set(self.hosts) == {socket.gethostname()}

    def hosts_option(self) -> str | None:
        """Returns the value of --hosts, as in "h0:2,h1:2"; None if all tasks are on this host."""
        return None if self.on_this_host_only else ",".join(f"{host}:{n}" for host, n in self.hosts.items())

    def command(self, program: Sequence[str]) -> str:
        """Returns the command line that starts `program` once for every task that trains."""
        hosts = self.hosts_option()
        where = ["-np", str(len(self.tasks))] if hosts is None else ["--hosts", hosts]
        return shlex.join(["keras-ddl", "run", *where, *program])

    def left_out_text(self) -> str:
        """Returns a sentence about tasks without a rank, or "" if there are none."""
        parts = []
        if evaluators := [str(task) for task in self.left_out if task.type == "evaluator"]:
            parts.append(f"{', '.join(evaluators)} (start its own script alone, or pass validation_data to fit)")
        if servers := [str(task) for task in self.left_out if task.type != "evaluator"]:
            parts.append(f"{', '.join(servers)} (ranks reduce among themselves; there is nothing to serve)")
        return f"Left out: {'; '.join(parts)}." if parts else ""


def read(environ: Mapping[str, str] | None = None) -> Cluster:
    """Parses TF_CONFIG of the environment; returns a Cluster without tasks if it is unset or empty.

    Raises: ConfigError: it is invalid.
    """
    text = (os.environ if environ is None else environ).get(NAME, "")
    return parse(text) if text.strip() else Cluster()


def parse(text: str, origin: str = NAME) -> Cluster:
    """Parses a TF_CONFIG. Raises: ConfigError: it is invalid."""
    try:
        return _cluster(json.loads(text))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        shown = text if len(text) <= 200 else text[:200] + "..."
        raise ConfigError(
            f"{origin} must be JSON with the addresses of a cluster by type of task, as in {_EXAMPLE}. Received: "
            f"{shown!r} ({type(error).__name__}: {error}). Unset TF_CONFIG if no cluster is meant."
        ) from None


def for_rank(text: str, rank: int, size: int) -> str | None:
    """Returns the TF_CONFIG for one rank of a job with the TF_CONFIG `text`: the same cluster with the rank's task.

    Returns: `text` if it has no cluster or is invalid; None if the number of tasks differs from `size`.
    """
    try:
        cluster = parse(text)
    except ConfigError:
        return text
    if not cluster.tasks:
        return text
    if len(cluster.tasks) != size:
        return None
    task = cluster.tasks[rank]
    return json.dumps({**json.loads(text), "task": {"type": task.type, "index": task.index}})


def check_not_one_of_a_cluster() -> None:
    """Raises ConfigError if TF_CONFIG makes this process one of several; the message has the command for all ranks.

    Called in a process without a launcher, which would silently train alone, like every other task of the cluster.
    """
    cluster = read()
    if len(cluster.tasks) < 2 or (cluster.own is not None and cluster.own.type == "evaluator"):
        return  # an evaluator runs alone
    program = own_program()
    words = [
        f"TF_CONFIG names {len(cluster.tasks)} tasks that train together, but only a launcher can connect them as "
        f"ranks. Received: {cluster.own or 'a process'} without a launcher (rank 0 of size 1). Start all ranks with "
        f"one command, on one of the hosts:\n\n    {cluster.command(program)}\n\nor, on a host where TF_CONFIG is "
        f"set, `{shlex.join(['keras-ddl', 'run', '--tf-config', *program])}`. If a host has more GPUs than tasks, "
        "write the number of GPUs after its name, because each rank drives one GPU.",
        cluster.left_out_text(),
        "Unset TF_CONFIG to train in this process alone.",
    ]
    raise ConfigError(" ".join(word for word in words if word))


def own_program() -> list[str]:
    """Returns the command line of this process with `python` as interpreter; `python train.py` if it has no script."""
    words = getattr(sys, "orig_argv", [])[1:]
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    runs_a_script = main and words and not any(host in word for host in _HOSTS_OF_FUNCTIONS for word in words)
    return ["python", *(words if runs_a_script else ["train.py"])]


def _cluster(content: Any) -> Cluster:
    """Returns the cluster that the content of TF_CONFIG describes. Raises: ValueError: there are several chiefs."""
    addresses = {kind: _by_index(listed) for kind, listed in content.get("cluster", {}).items()}
    tasks = [
        Task(kind, index, _host(address))
        for kind in sorted(addresses)  # the chief comes before the workers
        for index, address in addresses[kind].items()
    ]
    training = [task for task in tasks if task.type in _TRAINING]
    if sum(task.type == "chief" for task in training) > 1:
        raise ValueError("more than one chief")
    hosts = list(dict.fromkeys(task.host for task in training))
    training.sort(key=lambda task: hosts.index(task.host))  # mpirun fills host by host
    own = content.get("task") or {}
    mine = None
    if "type" in own:
        mine = Task(str(own["type"]), int(own.get("index", 0)), None)
        mine = next((task for task in tasks if (task.type, task.index) == (mine.type, mine.index)), mine)
    return Cluster(
        tasks=tuple(training),
        left_out=tuple(task for task in tasks if task.type not in _TRAINING),
        own=mine,
        addresses={kind: list(addresses[kind].values()) for kind in _TRAINING if addresses.get(kind)},
    )


def _by_index(listed: Any) -> dict[int, str]:
    """Returns index -> address for one type of task. `listed`: a list, or a dict by index if some are missing."""
    if isinstance(listed, str):
        raise TypeError("a list of addresses is expected")
    pairs = listed.items() if isinstance(listed, dict) else enumerate(listed)
    return dict(sorted((int(index), address) for index, address in pairs))


def _host(address: str) -> str:
    match = re.fullmatch(r"(?:[a-z]+://)?(?:\[([^\]]+)\]|([^:/]+))(?::\d+)?/?", address)
    if match is None:
        raise ValueError(f"{address!r} is no host:port")
    host = match[1] or match[2]
    loopback = host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.")
    return "localhost" if loopback else host
