"""The fork server: a process that has imported TensorFlow, and forks one process for each model version.

Importing TensorFlow takes seconds, but forking a process that has imported it takes milliseconds. So a version answers
again soon after its process has died. The fork server runs no operation, so it has no threads of TensorFlow.

When the server ends, the kernel closes the socket between the server and the fork server, which then kills its
processes and ends. If the fork server is killed, the kernel kills its processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from keras_ddl.compat.tensorflow_packages import import_without_keras
from keras_ddl.launch.output import startup_notes
from keras_ddl.launch.rank.processes import die_with_parent
from keras_ddl.serving.settings import Options

MOST_BYTES = 2**20  # largest message that can be sent


def main(descriptor: int, modules: list[str]) -> None:
    """Answers the server's messages (forked.py). `modules`: imported first, because they register operations."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server handles them, and finishes running requests
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    with startup_notes.hidden():
        import_without_keras()
        model_process = importlib.import_module("keras_ddl.serving.prediction.main")
        from keras_ddl.compat.tensorflow import tf

        for module in modules:
            importlib.import_module(module)
    tf.get_logger().setLevel(logging.ERROR)
    gc.freeze()  # keeps the garbage collector from touching these objects, so that their memory stays shared
    running: set[int] = set()

    def reap(*arguments: Any) -> None:
        for pid in list(running):
            try:
                ended, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # the handler has already reaped it
                ended = pid
            if ended:
                running.discard(pid)

    def kill(pid: int) -> None:
        if pid in running:  # not reaped, so the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGCHLD, reap)
    while True:
        data, descriptors, *_ = socket.recv_fds(control, MOST_BYTES, 1)
        if not data:
            break
        message = json.loads(data)
        if "kill" in message:
            kill(message["kill"])
            continue
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(descriptors[0])
            running.add(pid)
            reap()  # it may have ended before it was added to `running`
            with contextlib.suppress(OSError):  # the server has ended
                control.send(str(pid).encode())
            continue
        try:
            die_with_parent(signal.SIGKILL, parent)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            model_process.main(
                socket.socket(fileno=descriptors[0]),
                Path(message["path"]),
                message["name"],
                message["version"],
                Options(**message["options"]),
            )
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    for pid in list(running):
        kill(pid)
    while running:
        time.sleep(0.01)
        reap()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
