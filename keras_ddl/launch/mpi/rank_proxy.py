"""The proxy that mpirun starts for each rank. Its child is the rank's wrapper.

    python -P -m keras_ddl.launch.mpi.rank_proxy -- python train.py ...

The wrapper has its own process group, because MPICH sends SIGKILL to all ranks when one aborts, and the wrapper must
survive to end the program and report. It gets no separate session, because Linux divides a core between sessions first
(autogroup), so a communication thread's priority would not count against other ranks, and a polling thread of another
rank could delay it by seconds.
"""

from __future__ import annotations

import os
import signal
import sys

from keras_ddl.launch.rank.processes import die_with_parent, signal_quietly
from keras_ddl.launch.rank.rank_process import FOR_THE_PROGRAM, run_wrapper


def main(argv: list[str]) -> int:
    """Entry point; `argv` is ["--", program, arguments...]."""
    parent = os.getpid()
    child = os.fork()
    return _run_proxy(child) if child else run_wrapper(argv[1:], parent)


def _run_proxy(child: int) -> int:
    """Forwards signals to the wrapper and returns its exit status. It dies with mpirun's daemon."""
    for signum in FOR_THE_PROGRAM:
        signal.signal(signum, lambda number, _: signal_quietly(child, number))
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: signal_quietly(child, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    die_with_parent(signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
