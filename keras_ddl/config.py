"""The table of all KERAS_DDL_* environment variables. Nothing else in the package reads them.

Parts add rows (parts.py).

`get("DEADLINE_SECONDS")` returns the typed value of KERAS_DDL_DEADLINE_SECONDS. A value of the wrong type is a
ConfigError, and so is a variable that is not in the table, because a misspelled one would be silently ignored.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from keras_ddl import parts
from keras_ddl.errors import ConfigError

T = TypeVar("T")

PREFIX = "KERAS_DDL_"


class Seconds:
    """Waiting times between the processes of a job, in seconds. Users' settings are in the table below."""

    # Connections.
    CONNECT = 30.0  # until a rank's wrapper has found the launcher
    ADMIT = 60.0  # until the launcher has admitted a wrapper: strangers may flood it, or its machine may freeze
    PROOF = 30.0  # until a process has proved that it belongs to the job, on a machine that may freeze
    MEET = 10.0  # until a rank on another host answers
    LOOK_AGAIN = 1.0  # until a rank checks again whether the ranks that it waits for still wait for it
    LOST_AFTER = 25.0  # until another host without a sign of life counts as lost: a network may fail briefly
    # The start and the end of a job.
    START = 120.0  # until all ranks have connected
    AFTER_FAILURE = 5.0  # until all others are ended, if a wrapper has failed before it connected
    GRACE = 2.0  # from SIGTERM to SIGKILL
    INTERRUPT_GRACE = 5.0  # from SIGINT to SIGKILL
    STARTER_END = 3.0  # until the starter of the ranks has ended after them
    DAEMONS = 5.0  # until mpirun's daemons have ended and removed their files, after mpirun has ended
    MPIRUN_GRACE = 0.4  # from SIGTERM to SIGKILL under Open MPI, which sends SIGKILL itself after a second
    MPIRUN_END = 5.0  # until mpirun has ended, after the launcher is gone
    DRAIN = 0.3  # for the rest of a program's output, which processes left behind may keep open
    GOODBYE = 15.0  # until the launcher lets a wrapper leave
    # Lost ranks.
    KILLING = 5.0  # until a process that cannot be killed is given up
    LEAVING = 30.0  # until a rank that has left the job, but not ended, is killed


@dataclass(frozen=True)
class Variable:
    """One row of the table.

    Attributes:
        name: the name without the prefix. default: the value when the variable is unset or empty.
        is_set_by_keras_ddl: whether keras_ddl's processes set it for each other, so that it is not a user's setting.
    """

    name: str
    type: str
    default: Any
    why: str
    is_set_by_keras_ddl: bool = False

    @property
    def environment_name(self) -> str:
        return PREFIX + self.name


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"one of {', '.join(map(repr, values))}")
        return text

    return parse


def _at_least(minimum: int, what: str = "an integer") -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = _parse(int, text, f"{what}, {minimum} or more")
        if value < minimum:
            raise ValueError(f"{what}, {minimum} or more")
        return value

    return parse


def _seconds(text: str) -> float:
    value = _parse(float, text, "a number of seconds, 0 for never")
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError("a finite number of seconds, 0 for never")
    return value


def _silence(text: str) -> float:
    value = _seconds(text)
    if 0 < value < 1:
        raise ValueError("1 second or more, 0 for never")
    return value


def _percent(text: str) -> float:
    value = _parse(float, text, "a number from 0 to 100")
    if not 0 <= value <= 100:
        raise ValueError("a number from 0 to 100")
    return value


_bytes = _at_least(1, "an integer number of bytes")


def _bytes_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else _bytes(text)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def _host_rank(text: str) -> tuple[int, int, str, int]:
    match = re.fullmatch(r"(\d+)/(\d+)(?:/(\d+))?@(/.+)", text)
    if not match:
        raise ValueError("rank/size/hosts@directory, as `keras-ddl run` sets it; it is not meant for users")
    return int(match[1]), int(match[2]), match[4], int(match[3] or 1)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _parse(kind: Callable[[str], T], text: str, rule: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(rule) from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "path": os.path.expanduser,
    "seconds": _seconds,
    "seconds, 1 or more": _silence,
    "percent": _percent,
    "bytes": _bytes,
    "bytes or auto": _bytes_or_auto,
    "count": _at_least(0),
    "0 or 1": _switch,
    "rank/size/hosts@directory": _host_rank,
    "isa": _one_of("baseline", "avx2", "avx512"),
    "kernels": _one_of("auto", "async", "sync"),
    "auto, nccl, hierarchical or staged": _one_of("auto", "nccl", "hierarchical", "staged"),
    "auto, none or path": os.path.expanduser,
}

_TABLE = (
    Variable(
        "MODE",
        "text",
        "p",
        "Topology: 'p' follows the hosts; 'x:LxH[xR]' sets its dimensions, and L consecutive ranks share memory.",
    ),
    Variable(
        "RACK",
        "text",
        None,
        "Name of this host's rack (or switch), set on every host: mode 'p' then sends less between racks.",
    ),
    Variable(
        "WARN_AFTER_SECONDS",
        "seconds",
        30.0,
        "A collective that waits this long names the missing ranks on stderr. The default is longer than tracing a "
        "first step takes.",
    ),
    Variable(
        "DEADLINE_SECONDS",
        "seconds",
        600.0,
        "A collective that waits this long fails with DeadlineError, because a hanging job costs more than a failure.",
    ),
    Variable(
        "LOST_AFTER_SECONDS",
        "seconds, 1 or more",
        8.0,
        "A host without a sign of life for this long counts as lost (RankLostError). The default is longer than a "
        "saturated link delays messages. Ranks of one host are watched through the operating system instead.",
    ),
    Variable("STAGING_BYTES", "bytes", 64 << 20, "Limit on the shared memory in which a host's ranks reduce."),
    Variable(
        "FEEDBACK_BYTES",
        "bytes",
        4 << 30,
        "Limit on a rank's memory for the rounding errors of compressed sums, which are added to the next sums. Above "
        "it the errors of the least recent sums are dropped, with a warning.",
    ),
    Variable(
        "CMA",
        "0 or 1",
        True,
        "1: the ranks of a host may read and write each other's buffers directly (cross memory attach), if the system "
        "allows it (Yama: only with kernel.yama.ptrace_scope=0) and measurements show it to be faster; 0: shared "
        "memory only.",
    ),
    Variable(
        "DEVICE",
        "auto, nccl, hierarchical or staged",
        "auto",
        "How tensors on GPUs are sent, if each rank has its own GPU. 'auto': by NCCL on one host, and in the "
        "fastest of the other three ways on several; 'nccl': by NCCL, also between hosts; 'hierarchical': all-reduces "
        "by NCCL inside hosts only; 'staged': through the host, with the same bits as for CPU tensors.",
    ),
    Variable(
        "BUCKET_BYTES",
        "bytes or auto",
        "auto",
        "Bytes of gradients in one collective: large enough for full bandwidth, small enough to overlap with the "
        "backward pass. 'auto': measured when the first Strategy is created.",
    ),
    Variable(
        "EXPLAIN_STEP",
        "0 or 1",
        False,
        "1: rank 0 lists each collective of a step when it is traced, also of fit, evaluate and predict: bytes, "
        "reason, line.",
    ),
    Variable(
        "ALL_FRAMES",
        "0 or 1",
        False,
        "1: the traceback of an uncaught exception also shows the frames of keras_ddl, Keras and TensorFlow, as after "
        "keras.config.disable_traceback_filtering(); 0: only the program's own frames.",
    ),
    Variable(
        "FIRST_BUCKET_BYTES", "bytes", 1 << 20, "Size of the first bucket: small, so that communication starts early."
    ),
    Variable(
        "DRIFT_CHECK_PERCENT",
        "percent",
        1.0,
        "Share of the training time in which a Strategy compares its ranks' weights, in addition to the end of each "
        "epoch. 0: never, so a difference goes unnoticed.",
    ),
    Variable(
        "DATA_CHECK_BATCHES",
        "count",
        20,
        "Ranks compare digests of the first batches, and of every batch whose number is a multiple of this, because "
        "all must take their rows from the same batch. 0: no batch.",
    ),
    Variable(
        "SHARD_FROM_ELEMENTS",
        "count",
        65536,
        "Strategy(sharding='optimizer') shards the optimizers' slots of weights with this many elements or more; rank "
        "0's value counts.",
    ),
    Variable(
        "GATHERED_WEIGHT_BYTES",
        "bytes",
        64 << 20,
        "Strategy(sharding='weights') gathers at most this many bytes of weights at a time in a step, or as many as "
        "one operation needs. A higher limit lets gathers run further ahead, and weights that are used again soon "
        "are then gathered only once. Rank 0's value counts.",
    ),
    Variable(
        "ISA",
        "isa",
        None,
        "Highest instruction set of the reduction kernels (read by the native library); results do not depend on it.",
    ),
    Variable(
        "TF_KERNELS",
        "kernels",
        "auto",
        "Kernels of the TensorFlow ops. 'async' frees TensorFlow's threads while ranks wait, but uses an internal "
        "interface of TensorFlow. 'auto': 'async' for tested versions of TensorFlow, else 'sync'.",
    ),
    Variable(
        "TF_STREAM",
        "auto, none or path",
        "none",
        "The library that lets collectives take TensorFlow's tensors on GPUs where they are; never run on a real GPU. "
        "'auto': g++ builds it when it is first needed; 'none', or where it cannot be built: TensorFlow copies tensors "
        "to the host and back.",
    ),
    Variable(
        "TIMELINE",
        "path",
        None,
        "Every rank writes a timeline of its collectives and steps, for chrome://tracing and Perfetto, to this path "
        "with .rankN before the suffix.",
    ),
    Variable(
        "PREFLIGHT",
        "0 or 1",
        True,
        "Whether `keras-ddl run` checks, before the ranks start, that hosts can be reached, have the same versions and "
        "have room in /dev/shm.",
    ),
    Variable(
        "RESTART",
        "count",
        0,
        "Set by the launcher: how many times the job was restarted.",
        is_set_by_keras_ddl=True,
    ),
    Variable(
        "JOB_DIR",
        "path",
        None,
        "Set by the launcher of a job with restarts: a directory on the host's disk, the same after a restart, removed "
        "at the job's end.",
        is_set_by_keras_ddl=True,
    ),
    Variable(
        "RANK_PROCESS",
        "count",
        0,
        "Set by init: the process id of the rank, so that its child processes know that they are not ranks.",
        is_set_by_keras_ddl=True,
    ),
    Variable(
        "RUN_DIR",
        "path",
        None,
        "Set by the launcher: where a rank writes the report of an uncaught exception.",
        is_set_by_keras_ddl=True,
    ),
    Variable(
        "LAUNCHER",
        "text",
        None,
        "Set by the launcher for the wrapper of each rank: the launcher's address.",
        is_set_by_keras_ddl=True,
    ),
    Variable(
        "HOST_RANK",
        "rank/size/hosts@directory",
        None,
        "Set by the launcher if it starts the ranks without mpirun: this rank's number (spares start at `size`), and "
        "the directory of the sockets of this host's ranks.",
        is_set_by_keras_ddl=True,
    ),
    Variable(
        "JOB_ID",
        "text",
        None,
        "Set by the launcher for the processes that start ranks on several hosts without mpirun: a secret from which "
        "each host makes the name of the job's directory.",
        is_set_by_keras_ddl=True,
    ),
    Variable(
        "SSH",
        "text",
        "ssh",
        "The command with which `keras-ddl run` reaches other hosts to start ranks without mpirun. Its arguments are a "
        "host and a command line.",
    ),
    Variable(
        "MPIRUN",
        "path",
        None,
        "If set, this mpirun starts the ranks. Default, if a job needs one: the mpirun that keras_ddl was built with, "
        "then the one next to python, then PATH.",
    ),
)

_PART_VARIABLES = (
    Variable(name, row["type"], row.get("default"), row["why"], row.get("is_set_by_keras_ddl", False))
    for part in parts.installed()
    for name, row in part.settings.items()
)
VARIABLES: Mapping[str, Variable] = {row.name: row for row in (*_TABLE, *_PART_VARIABLES)}


def get(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Returns the value of KERAS_DDL_<name>, or the table's default when it is unset or empty.

    Raises:
        ConfigError: the value is not of the row's type.
        KeyError: `name` is not in the table (a bug of the caller).
    """
    row = VARIABLES[name]
    text = environ.get(row.environment_name)
    if not text:
        return row.default
    try:
        return _PARSERS[row.type](text)
    except ValueError as error:
        raise ConfigError(
            f"{row.environment_name} must be {error}. Received: {row.environment_name}={text!r}. Unset it for the "
            f"default ({row.default})."
        ) from None


def is_set(name: str) -> bool:
    """Whether the environment sets KERAS_DDL_<name>; an empty value counts as unset."""
    return bool(os.environ.get(VARIABLES[name].environment_name))


def unknown() -> list[str]:
    """Returns the KERAS_DDL_* variables of the environment that are not in the table and would be ignored."""
    known = {row.environment_name for row in VARIABLES.values()}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


def chosen() -> dict[str, str]:
    """Returns the texts of the table's variables that the user has set, without variables that the launcher sets."""
    names = (row.environment_name for row in VARIABLES.values() if not row.is_set_by_keras_ddl)
    return {name: os.environ[name] for name in names if os.environ.get(name)}


@contextlib.contextmanager
def override(name: str, value: str) -> Iterator[None]:
    """Sets KERAS_DDL_<name> inside the block, for native code that reads it."""
    variable = VARIABLES[name].environment_name
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def check_environment() -> None:
    """Checks every KERAS_DDL_* variable of the environment.

    Raises:
        ConfigError: a variable is not in the table (the message names the nearest), or its value is invalid.
    """
    for name in unknown():
        near = difflib.get_close_matches(name, [row.environment_name for row in VARIABLES.values()], n=1, cutoff=0)[0]
        raise ConfigError(
            f"Every {PREFIX}* variable must be one of keras_ddl's settings. Received: "
            f"{name}={os.environ[name]!r}. The nearest is {near}; `keras-ddl info --all` lists all."
        )
    for row in VARIABLES.values():
        get(row.name)


def version() -> str:
    """Returns the installed version of keras_ddl."""
    from importlib import metadata

    try:
        return metadata.version("keras_ddl")
    except metadata.PackageNotFoundError:
        return "0+not.installed"
