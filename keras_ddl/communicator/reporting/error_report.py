"""Handles uncaught exceptions of a rank: prints the traceback, leaves a report for the launcher, and ends the job.

Without this, the failing process would wait in MPI_Finalize for ranks that wait for it.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from keras_ddl import config
from keras_ddl.communicator.reporting import shown_frames
from keras_ddl.errors import lost_rank_behind
from keras_ddl.link import last_checkpoint, program
from keras_ddl.link.kinds import Kind

_INTERRUPTED = 130
# mpirun forwards the output of ranks through pipes; output still in a pipe when the job is aborted is lost.
_FORWARDING_SECONDS = 0.2
# How long to wait for the exit status of a rank that has left. With TensorFlow a process takes seconds to end on a busy
# machine. If it ends with its own status (sys.exit(3)), the launcher must end the job with that status, so this
# rank must not abort first. The wait ends early if no rank has such a status.
_LEAVING_SECONDS = 10.0
_LOOK_SECONDS = 0.005
_ABORT_LIMIT_SECONDS = 5.0

# The traceback that TensorFlow quotes in an error message if a Python function that it called has raised, such as a
# data generator. An empty line follows each line.
_EMBEDDED = re.compile(r"^Traceback \(most recent call last\):\n.*?(?=\n*\t \[\[|\n*\Z)", re.MULTILINE | re.DOTALL)

_installed = False
_lock = threading.Lock()


def install(
    rank: int, abort: Callable[[int], None] | None, no_pending_exit_status: Callable[[], bool] = lambda: True
) -> None:
    """Installs the hooks for uncaught exceptions of all threads. Once per process.

    Args:
        abort: ends all ranks with an exit status; None: there are no other ranks, and Python ends the process.
        no_pending_exit_status: announces that this rank ends because another rank has left. Returns whether no other
            rank will end with its own exit status.
    """
    global _installed
    if _installed:
        return
    _installed = True
    process = os.getpid()
    main_hook, thread_hook = sys.excepthook, threading.excepthook

    def end(kind: type[BaseException], error: BaseException, text: ErrorText) -> None:
        with _lock:  # two threads that fail at once: one report, one abort
            _write(rank, error, text)
            if abort is not None and not hasattr(sys, "ps1"):
                _end_all(kind, error, abort, no_pending_exit_status)

    def in_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        error.__traceback__ = trace
        text = for_program(error)
        if main_hook is sys.__excepthook__:
            print(text.traceback, end="", file=sys.stderr)
        else:
            main_hook(kind, error, error.__traceback__)
        if os.getpid() == process:  # a forked child is not a rank
            _print_resume_hint()
            end(kind, error, text)

    def in_thread(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is None or arguments.exc_type is SystemExit:
            thread_hook(arguments)
            return
        error.__traceback__ = arguments.exc_traceback
        text = for_program(error)
        if thread_hook is threading.__excepthook__:
            name = "an unknown thread" if arguments.thread is None else f"thread {arguments.thread.name}"
            print(f"Exception in {name}:\n{text.traceback}", end="", file=sys.stderr)
        else:
            thread_hook(threading.ExceptHookArgs((arguments.exc_type, error, error.__traceback__, arguments.thread)))
        if os.getpid() == process:
            end(arguments.exc_type, error, text)

    sys.excepthook, threading.excepthook = in_main, in_thread


def _print_resume_hint() -> None:
    """Prints the last checkpoint below the traceback, unless `keras-ddl run` will do so."""
    checkpoint = last_checkpoint.known()
    if checkpoint is not None and not config.is_set("RUN_DIR"):
        print(f"keras_ddl: {last_checkpoint.resume_hint(checkpoint)}", file=sys.stderr)


@dataclass(frozen=True)
class ErrorText:
    """The text shown for an exception.

    Attributes:
        traceback: the program's own frames, then the message once.
        summary: class and message.
        leaves_out: whether frames of keras_ddl, Keras and TensorFlow are left out (shown_frames.py).
        is_within: the exception is one that TensorFlow quoted in the message of its own error.
    """

    traceback: str
    summary: str
    leaves_out: bool
    is_within: bool


def for_program(error: BaseException) -> ErrorText:
    """Returns the text to show for an uncaught exception, and removes hidden frames from its traceback."""
    leaves_out = shown_frames.leave_out(error)
    own = _own_traceback(error)
    if own is not None:  # raised in a function that TensorFlow called; shown instead of TensorFlow's error
        header, _, rest = shown_frames.text_without(own).partition("\n")
        text = "\n".join([header, *"".join(traceback.format_tb(error.__traceback__)).splitlines(), rest])
        return ErrorText(text, rest.strip().rpartition("\n")[2], leaves_out, is_within=True)
    text = "".join(traceback.format_exception(error))
    message = traceback.format_exception_only(error)[-1]
    shown = shown_frames.text_without(message)  # TensorFlow's messages contain frames, too
    return ErrorText(text.removesuffix(message) + shown, shown.strip(), leaves_out, is_within=False)


def _own_traceback(error: BaseException) -> str | None:
    """Returns the traceback of the program's own exception that TensorFlow's error quotes, or None."""
    if not type(error).__module__.startswith("tensorflow."):
        return None
    embedded = _EMBEDDED.search(str(error))
    return re.sub(r"\n\n+", "\n", embedded[0]) + "\n" if embedded else None


def write(rank: int, error: BaseException, *, gives_up: bool = False) -> None:
    """Reports the exception to the launcher, if there is one. It keeps only a rank's first report.

    `gives_up`: the rank is a newcomer, and the others continue without it.
    """
    _write(rank, error, for_program(error), gives_up=gives_up)


def _write(rank: int, error: BaseException, text: ErrorText, *, gives_up: bool = False) -> None:
    report: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "time": time.time(),
        "type": type(error).__name__,
        "summary": text.summary,
        "traceback": text.traceback,
        "leaves_out": text.leaves_out,
        "gives_up": gives_up,
        # Whether the error says why the remaining ranks do not continue without the lost one.
        "ends_others": hasattr(error, "ends_others"),
    }
    if (failed_rank := getattr(error, "failed_rank", None)) is not None:  # a step fails on all ranks
        report |= {"failed_rank": failed_rank, "failed_alike": getattr(error, "failed_alike", False)}
    if (lost := lost_rank_behind(error)) is not None:
        report["lost"] = {"ranks": lost.ranks, "has_left": lost.has_left}
    program.tell(Kind.REPORT, report)


def _end_all(
    kind: type[BaseException],
    error: BaseException | None,
    abort: Callable[[int], None],
    no_pending_exit_status: Callable[[], bool],
) -> None:
    """Ends all ranks after an uncaught exception, when the report and the output have had time to arrive."""
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
