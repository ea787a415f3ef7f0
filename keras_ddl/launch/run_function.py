"""keras_ddl.run: calls a function of a notebook or script on several ranks."""

from __future__ import annotations

import linecache
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from keras_ddl import config
from keras_ddl.errors import ConfigError, DeadlineError, LaunchError, RankError
from keras_ddl.launch import job as job_module
from keras_ddl.launch.job import JobResult
from keras_ddl.launch.outcome import RankOutcome, explain
from keras_ddl.launch.output import startup_notes
from keras_ddl.launch.output.screen import Screen
from keras_ddl.launch.output.sinks import FileDescriptorSink, Sink, TextSink
from keras_ddl.launch.rank.rank_environment import python_path
from keras_ddl.launch.restarts import RestartLoop


def run(
    fn: Callable[..., Any],
    np: int | None = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    mode: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    *,
    hosts: str | None = None,
    restarts: int = 0,
    verbose: bool = False,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on `np` ranks, each a fresh process, and returns their results by rank.

    The function is sent by value (cloudpickle), with the variables it closes over; it may be a lambda or a notebook's
    function. Modules that it imports must be installed. Rank 0's output appears here as it arrives; lines of other
    ranks begin with the rank. The calling process is not a rank and needs neither TensorFlow nor MPI.

    Args:
        fn, args, kwargs: the function, and its arguments, the same on all ranks.
        np: number of ranks, 1 or more. None: as many as `hosts` or the resource manager has slots for.
            With a number, `hosts` only determines where the ranks run.
        mode: topology, as for `keras_ddl.init`.
        timeout: seconds after which the ranks are stopped.
        env: variables to set for the ranks.
        hosts: where the ranks run, as in "h0:2,h1:2". None: this machine, or the hosts of the resource manager.
        restarts: how many times all ranks are started again, with the same call, after a rank has failed
            (docs/launch.md).
        verbose: show the mpirun command, mpirun's output, and TensorFlow's messages at its import.

    Returns: a list; result r is what rank r returned.

    Raises:
        the exception of the rank that failed first; its cause is a RankError with that rank's traceback.
        RankError: that exception cannot be pickled, or the rank ended without an exception.
        ConfigError: invalid arguments; `fn` or its arguments cannot be pickled.
        LaunchError: mpirun is missing, or ranks did not start.
        DeadlineError: `timeout` has passed.
        KeyboardInterrupt: the cell was interrupted; the ranks have been stopped.

    Cost: about a second to start a rank, and about five more to import TensorFlow in it.
    """
    if config.is_set("RUN_DIR"):
        raise LaunchError(
            "keras_ddl.run() must not be called by a rank of a job: every rank would start another job. Received: "
            f"a call in process {os.getpid()}, which keras-ddl started. Call it from a program that is not a rank."
        )
    job = job_module.make(
        [sys.executable, "-P", "-m", "keras_ddl.launch.worker"],
        num_ranks=np,
        hosts=hosts,
        mode=mode,
        env={"PYTHONPATH": python_path(), **(env or {})},
        timeout=timeout,
        verbose=verbose,
        call=_pickle_call(fn, args, kwargs or {}),
    )
    sys.stdout.flush()
    sys.stderr.flush()
    screen, terminals = _screen(verbose or startup_notes.are_wanted(job.environment))
    # SIGTERM and SIGHUP keep their meaning for the caller; the ranks notice when it is gone.
    result = RestartLoop(job, screen, limit=restarts, terminals=terminals).run((signal.SIGINT,))
    return _values(result, timeout)


def _pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    if not callable(fn):
        raise ConfigError(f"fn must be a function. Received: fn={fn!r} ({type(fn).__name__}).")
    from keras_ddl.communicator import by_value

    try:
        function = by_value.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        raise ConfigError(
            "fn, its arguments and the variables it uses must be picklable, to be sent to the ranks. Received: "
            f"{getattr(fn, '__qualname__', fn)!s}, which is not: {type(error).__name__}: {error}. Create objects that "
            "cannot be pickled (models, datasets, open files, locks) inside fn, and pass plain values as arguments."
        ) from error
    call = {"sys_path": [str(path) for path in sys.path], "sources": _cell_sources(), "function": function}
    return pickle.dumps(call)


def _cell_sources() -> dict[str, list[str]]:
    """Returns file name -> lines of code that exists only in this process, such as notebook cells."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: list(entry[2]) for name, entry in entries.items() if entry[2] and not Path(name).exists()}


def _screen(shows_notes: bool) -> tuple[Screen, dict[str, int]]:
    """Returns the screen for output: the terminal of a script, or sys.stdout of a notebook's cell."""
    sinks: list[Sink] = []
    terminals = {}
    for name, stream, fd in (("stdout", sys.stdout, 1), ("stderr", sys.stderr, 2)):
        if _is_terminal(stream, fd):
            terminals[name] = fd
            sinks.append(FileDescriptorSink(fd))
        else:
            sinks.append(TextSink(stream))
    return Screen(*sinks, shows_notes=shows_notes), terminals


def _is_terminal(stream: TextIO, fd: int) -> bool:
    try:
        return stream.isatty() and stream.fileno() == fd
    except (AttributeError, OSError, ValueError):
        return False


def _values(result: JobResult, timeout: float | None) -> list[Any]:
    if result.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if result.signal is not None:
        raise BrokenPipeError("The reader of this process's output has gone away: the ranks have been stopped.")
    first = result.first_failure
    returned = {rank: pickle.loads(data) for rank, data in result.results.items()}
    if first is None and result.timed_out:
        raise DeadlineError(
            f"The function must end on every rank within timeout={timeout:g} seconds. It did not, and was stopped. "
            "Raise timeout, or leave it out."
        )
    if first is not None:
        _raise(first, returned.get(first.rank, {}), result)
    if not result.ok:
        raise LaunchError(
            f"The program that starts the ranks must end after them. Received: {result.starter} ended "
            f"({result.starter_end}), with output:\n{result.starter_text}"
        )
    without = [rank for rank in range(len(result.outcomes)) if "value" not in returned.get(rank, {})]
    if without:
        raise RankError(f"The function must return on every rank. Ranks {without} exited by sys.exit(0) instead.")
    return [_load_value(returned[rank]["value"], rank) for rank in range(len(result.outcomes))]


def _load_value(data: bytes, rank: int) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise RankError(
            f"The type of fn's result must be importable in the calling process. Received: the result of rank {rank}, "
            f"which cannot be unpickled here: {type(error).__name__}: {error}. Return plain values, or install its "
            "module here too."
        ) from error


def _raise(first: RankOutcome, returned: dict[str, Any], result: JobResult) -> None:
    if returned.get("traceback"):  # without the frames of worker.py
        first.report, first.traceback = None, returned["traceback"]
    remote = RankError(explain(result.outcomes, first, result.starter_text).strip())
    if returned.get("error") is None:
        raise remote
    try:
        error = pickle.loads(returned["error"])
    except Exception:
        raise remote from None
    if not isinstance(error, Exception):  # SystemExit, for one, would end the caller
        raise remote
    raise error from remote
