"""The fork server that starts the processes of model versions.

Importing TensorFlow takes seconds, forking a process that has imported it milliseconds: so a version answers again soon
after its process has died. The fork server runs no operation, hence has no threads of TensorFlow.
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
    """Returns the context of the fork server. `modules`: imported first, because they register operations."""
    result = get_context("forkserver")
    os.environ["PYTHONSAFEPATH"] = "1"  # the current folder may contain any module
    result.set_forkserver_preload(["__main__", f"{__package__}.forked_imports", *modules])
    return result


def begin(requests: socket.socket, *arguments: Any) -> None:
    """Entry point of the new process: runs model_process.main; ends with the server."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the server, which finishes running requests
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    importlib.import_module(f"{__package__}.model_process").main(requests, *arguments)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
