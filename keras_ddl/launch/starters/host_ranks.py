"""Starts the ranks of a job on this host: forks a wrapper for each. It needs no daemon and no port.

    python -P -m keras_ddl.launch.starters.host_ranks -np 2 --spares 1 -- python train.py

It replaces mpirun: it runs in a session without a terminal, and ends when all wrappers have ended. With
`--from-stdin` it reads from stdin this host's part of a job on several hosts, which remote_ranks.py writes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from keras_ddl import config
from keras_ddl.config import Seconds
from keras_ddl.errors import KerasDdlError
from keras_ddl.launch.address import Address
from keras_ddl.launch.rank import job_folder
from keras_ddl.launch.rank.processes import signal_quietly
from keras_ddl.launch.rank.rank_process import run_wrapper
from keras_ddl.link.channel import encoded
from keras_ddl.link.kinds import Kind

_AGAIN_SECONDS = 0.5
# The message is framed, because other output may precede it on stdout, such as a host's greeting.
READY = encoded(Kind.READY)


@dataclass(frozen=True)
class Part:
    """The processes of this host, one for each of `local_ranks`, numbered from `first`.

    Numbers from `size` on are spares and newcomers. `local_size`: ranks on this host. `directory`: the directory of the
    sockets.
    """

    first: int
    local_ranks: list[int]
    local_size: int
    size: int
    hosts: int
    directory: Path
    program: list[str]


def main(argv: list[str]) -> int:
    """Runs the command. `argv`: ["-np", number, "--", program, arguments...], or ["--from-stdin"].

    If there are spares, ["--spares", number] comes before "--".

    Returns the first nonzero status, or 0.
    """
    if argv[0] == "--from-stdin":
        try:
            part = _read_part(sys.stdin.buffer.readline())
        except KerasDdlError as error:
            print(f"keras-ddl: {type(error).__name__}: {error}", flush=True)
            return 1
        os.write(1, READY)
        status = _run(part)
        job_folder.remove_job_folder(part.directory.parent, 0.0)  # in case no wrapper reached the launcher
        return status
    end = argv.index("--")
    numbers = dict(zip(argv[:end:2], map(int, argv[1:end:2])))
    size, spares = numbers["-np"], numbers.get("--spares", 0)
    directory = Path(Address.parse(config.get("LAUNCHER") or "").path).parent
    return _run(Part(0, list(range(size + spares)), size, size, 1, directory, argv[end + 1 :]))


def _read_part(line: bytes) -> Part:
    message = json.loads(line)
    os.environ[config.VARIABLES["LAUNCHER"].environment_name] = message["launcher"]
    folder = job_folder.on_this_host(message["job"])
    directory = job_folder.make(folder, folder / job_folder.SOCKETS)
    parts = {name: message[name] for name in ("first", "local_ranks", "local_size", "size", "hosts", "program")}
    return Part(**parts, directory=directory)


def _run(part: Part) -> int:
    """Forks the wrappers of this host's ranks and waits for them. Returns the first failure's exit status, or 0.

    If a wrapper has failed, the others get some seconds to end, because the launcher may continue without it.
    """
    own = os.getpid()
    running: set[int] = set()
    for number, local_rank in enumerate(part.local_ranks, part.first):
        child = os.fork()
        if child == 0:
            rank = f"{number}/{part.size}/{part.hosts}@{part.directory}"
            os.environ[config.VARIABLES["HOST_RANK"].environment_name] = rank
            os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(local_rank)
            os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(part.local_size)
            os._exit(_run_wrapper(part.program, own))
        running.add(child)

    def pass_on(signum: int, _: object = None) -> None:
        for pid in running:
            signal_quietly(pid, signum)

    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(signum, pass_on)
    signal.signal(signal.SIGHUP, lambda *_: pass_on(signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # for sigtimedwait
    first, end_at = 0, float("inf")
    while running:
        pid, status = os.waitpid(-1, 0 if end_at == float("inf") else os.WNOHANG)
        if pid:
            running.discard(pid)
            status = os.waitstatus_to_exitcode(status)
            first = first or (status if status >= 0 else 128 - status)
            # A rank that was killed had probably reached the launcher, which may continue without it.
            if status > 0 and end_at == float("inf"):
                end_at = time.monotonic() + Seconds.AFTER_FAILURE
        elif (left := end_at - time.monotonic()) > 0:
            signal.sigtimedwait([signal.SIGCHLD], left)
        else:
            pass_on(signal.SIGTERM)
            end_at += _AGAIN_SECONDS
    return first


def _run_wrapper(command: list[str], parent: int) -> int:
    try:
        return run_wrapper(command, parent)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
