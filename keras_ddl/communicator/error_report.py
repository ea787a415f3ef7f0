"""Handles uncaught exceptions of a rank: prints the traceback, leaves a report for the launcher, and ends the job.

Without this, the failing process would wait in MPI_Finalize for ranks that wait for it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from keras_ddl import config
from keras_ddl.errors import lost_rank_behind
from keras_ddl.files import last_checkpoint
from keras_ddl.files.durable import write_whole

_INTERRUPTED = 130
# mpirun forwards the output of ranks through pipes; output that is still in them when the job is aborted is lost.
_FORWARDING_SECONDS = 0.2
# How long to wait for the exit status of a rank that has left: it is about to end its process, which takes TensorFlow
# seconds on a busy machine. If it ends with a status of its own (sys.exit(3)), the launcher must end the job with that
# status, so this rank must not abort first. The wait ends early when no rank has such a status.
_LEAVING_SECONDS = 10.0
_LOOK_SECONDS = 0.005
_ABORT_LIMIT_SECONDS = 5.0

# The traceback, in an error message of TensorFlow, of an exception in a function that TensorFlow has called, such as a
# data generator. Each line is followed by an empty one.
_EMBEDDED = re.compile(r"^Traceback \(most recent call last\):\n.*?(?=\n*\t \[\[|\n*\Z)", re.MULTILINE | re.DOTALL)

_installed = False
_lock = threading.Lock()


def install(
    rank: int, abort: Callable[[int], None] | None, no_pending_exit_status: Callable[[], bool] = lambda: True
) -> None:
    """Installs the hooks for uncaught exceptions of all threads. Once per process.

    Args:
        abort: ends all ranks with an exit status; None: there are no other ranks, and Python ends the process.
        no_pending_exit_status: announces that this rank ends because another one has left, and returns whether no rank
            is still to end with an exit status of its own.
    """
    global _installed
    if _installed:
        return
    _installed = True
    process = os.getpid()
    main_hook, thread_hook = sys.excepthook, threading.excepthook

    def end(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        with _lock:  # two threads that fail at once: one report, one abort
            write(rank, kind, error, trace)
            if abort is not None and not hasattr(sys, "ps1"):
                _end_all(kind, error, abort, no_pending_exit_status)

    def in_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        main_hook(kind, error, trace)
        print(own_traceback(error), end="", file=sys.stderr)
        if os.getpid() == process:  # a forked child is no rank
            _print_resume_hint()
            end(kind, error, trace)

    def in_thread(arguments: threading.ExceptHookArgs) -> None:
        thread_hook(arguments)
        print(own_traceback(arguments.exc_value), end="", file=sys.stderr)
        if os.getpid() == process and arguments.exc_type is not SystemExit:
            end(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    sys.excepthook, threading.excepthook = in_main, in_thread


def _print_resume_hint() -> None:
    """Prints the last checkpoint below the traceback, unless `keras-ddl run` will."""
    checkpoint = last_checkpoint.known()
    if checkpoint is not None and not config.is_set("RUN_DIR"):
        print(f"keras_ddl: {last_checkpoint.resume_hint(checkpoint)}", file=sys.stderr)


def own_traceback(error: BaseException | None) -> str:
    """Returns the traceback of the program's own exception in an error of TensorFlow, "" where there is none."""
    if error is None or not type(error).__module__.startswith("tensorflow."):
        return ""
    embedded = _EMBEDDED.search(str(error))
    return re.sub(r"\n\n+", "\n", embedded[0]) + "\n" if embedded else ""


def write(rank: int, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Writes error-<rank>.txt (JSON) to KERAS_DDL_RUN_DIR, if that is set, unless the rank has written one before."""
    if not config.is_set("RUN_DIR"):
        return
    path = Path(config.get("RUN_DIR")) / f"error-{rank}.txt"
    own = own_traceback(error)
    summary = own or traceback.format_exception_only(kind, error)[-1]
    report = {
        "rank": rank,
        "host": socket.gethostname(),
        "time": time.time(),
        "type": kind.__name__,
        "failed_rank": getattr(error, "failed_rank", rank),  # may be another: a step fails on all ranks
        "summary": summary.strip().rpartition("\n")[2] if own else summary.strip(),
        "traceback": "".join(traceback.format_exception(kind, error, trace)) + own,
    }
    if (lost := lost_rank_behind(error)) is not None:
        report["lost"] = {"ranks": lost.ranks, "has_left": lost.has_left}
    try:
        if not path.exists():
            write_whole(path, lambda part: Path(part).write_text(json.dumps(report)), synced=False)
    except OSError as problem:  # reporting must not hide the error itself
        # The launcher shows the last line of output of a rank without a report.
        print(f"keras_ddl: {report['summary']} (no report in {path.parent}: {problem.strerror})", file=sys.stderr)


def _end_all(
    kind: type[BaseException],
    error: BaseException | None,
    abort: Callable[[int], None],
    no_pending_exit_status: Callable[[], bool],
) -> None:
    status = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # closed or replaced
    time.sleep(_FORWARDING_SECONDS)
    lost = lost_rank_behind(error)
    if lost is not None and lost.has_left:
        end = time.monotonic() + _LEAVING_SECONDS
        while time.monotonic() < end and not no_pending_exit_status():
            time.sleep(_LOOK_SECONDS)
        time.sleep(_FORWARDING_SECONDS)  # the others have just flushed their output
    # MPI_Abort itself may hang when the launcher is gone.
    limit = threading.Timer(_ABORT_LIMIT_SECONDS, os._exit, (status,))
    limit.daemon = True
    limit.start()
    abort(status)
