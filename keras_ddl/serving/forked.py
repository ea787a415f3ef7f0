"""What the process that forks has imported, and where the processes that it forks begin.

To import TensorFlow takes seconds, to fork a process that has done so milliseconds: that is how a version answers again
soon after its process has been ended. The one that forks runs no operation, hence has no threads of TensorFlow's.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import ForkServerContext
from typing import Any


def context(modules: tuple[str, ...]) -> ForkServerContext:
    """Returns what makes processes by fork. `modules`: to import before, because they register operations."""
    found = get_context("forkserver")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["PYTHONSAFEPATH"] = "1"  # the folder that the server was started in may hold anything
    found.set_forkserver_preload(["__main__", f"{__package__}.forked_imports", *modules])
    return found


def begin(requests: socket.socket, *arguments: Any) -> None:
    """Runs in the new process: model_process.main, as long as the server lives."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the server, which finishes what is under way
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    importlib.import_module(f"{__package__}.model_process").main(requests, *arguments)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
