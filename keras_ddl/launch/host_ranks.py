"""Starts the ranks of a job on this host alone: forks a wrapper for each. No daemon, no port.

    python -P -m keras_ddl.launch.host_ranks -np 2 --spares 1 -- python train.py

It takes mpirun's place: it runs in a session without a terminal, and ends when all wrappers have ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

from keras_ddl import config
from keras_ddl.launch.control import Address
from keras_ddl.launch.processes import signal_quietly
from keras_ddl.launch.rank_process import run_wrapper

# A wrapper that fails before it has reached the launcher leaves the others waiting: they are ended after this time. The
# launcher ends connected ones earlier.
_AFTER_FAILURE_SECONDS = 5.0
_LOOK_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Entry point; `argv` is ["-np", number, "--", program, arguments...], with ["--spares", number] before "--" where
    there are some. Returns the first nonzero status, or 0.
    """
    end = argv.index("--")
    numbers, command = dict(zip(argv[:end:2], map(int, argv[1:end:2]))), argv[end + 1 :]
    size, spares = numbers["-np"], numbers.get("--spares", 0)
    directory = Path(Address.parse(config.get("LAUNCHER") or "").path).parent
    own = os.getpid()
    running: set[int] = set()
    for rank in range(size + spares):
        child = os.fork()
        if child == 0:
            os.environ[config.VARIABLES["HOST_RANK"].environment_name] = f"{rank}/{size}@{directory}"
            os._exit(_run_wrapper(command, own))
        running.add(child)

    def pass_on(signum: int, _: object = None) -> None:
        for pid in running:
            signal_quietly(pid, signum)

    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(signum, pass_on)
    signal.signal(signal.SIGHUP, lambda *_: pass_on(signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    first, end_at = 0, None
    while running:
        pid, status = os.waitpid(-1, 0 if end_at is None else os.WNOHANG)
        if pid:
            running.discard(pid)
            status = os.waitstatus_to_exitcode(status)
            first = first or (status if status >= 0 else 128 - status)
            if first and end_at is None:
                end_at = time.monotonic() + _AFTER_FAILURE_SECONDS
        elif end_at is not None and time.monotonic() >= end_at:
            pass_on(signal.SIGTERM)
            time.sleep(_LOOK_SECONDS)
        else:
            time.sleep(0.05)
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
