"""The wrapper: a process that runs the program of one rank and reports to the launcher.

The program's output goes to the launcher over the rank's connection. If the launcher's own output is a terminal, rank 0
writes to a pseudo-terminal, and so do all ranks of a job that may continue without rank 0. When the program ends, the
wrapper kills processes that the program left behind, and sends the exit status. It ends the program when the launcher
or the rank's starter (mpirun or host_ranks.py) orders it to, or when the launcher is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from keras_ddl import config
from keras_ddl.config import Seconds
from keras_ddl.errors import KerasDdlError, LaunchError
from keras_ddl.launch.address import Address, connect
from keras_ddl.launch.checks import host_facts
from keras_ddl.launch.interrupts import Interrupts
from keras_ddl.launch.output import startup_notes
from keras_ddl.launch.rank import job_folder, rank_environment
from keras_ddl.launch.rank.processes import die_with_parent, kill_marked
from keras_ddl.launch.rank.program_link import TO_PROGRAM, Frame, WrapperLink
from keras_ddl.launch.rank.rank_program import RankProgram, require_directory
from keras_ddl.link.channel import Channel
from keras_ddl.link.handshake import Impostor, introduce
from keras_ddl.link.kinds import Kind
from keras_ddl.link.loop import READ, WRITE, Source, serve

_LOSS = "the loss of the launcher"
_BACKLOG_BYTES = 1 << 20
_LINK_BACKLOG_BYTES = 4 << 20  # larger than for output: frames of the program are rare, but may hold a call's result
# Signals for the program. Slurm and mpirun send them to the wrapper, because they do not know the program's process.
FOR_THE_PROGRAM = (signal.SIGUSR1, signal.SIGUSR2)


class RankProcess:
    """One rank: its connection, its program, and the loop that serves both. The loop blocks only in poll."""

    def __init__(self, rank: int, size: int, address: Address, command: list[str], signals: Interrupts) -> None:
        """`signals`: collects the signals that the wrapper passes on to the program."""
        self.rank, self.size, self.command, self._signals = rank, size, command, signals
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # On a single host there is nothing to compare, so no facts are collected.
        self._facts = None if address.path else host_facts.facts()
        # A SIGTERM before this point just ends this process, because there is nothing to clean up yet.
        self._channel, self._welcome = self._introduce(address)
        self._run_dir = Path()
        self._job_dir: Path | None = None
        self._keep_job_dir = False
        self._mark = ""
        self._program: RankProgram | None = None
        self._link: WrapperLink | None = None  # the connection with the program
        self._stopped_by: str | None = None
        self._kill_at: float | None = None
        self._may_exit = False
        self._job_continues = False  # the other ranks have gone on without this one
        self._terminated = False
        self._starter = "mpirun" if config.get("HOST_RANK") is None else "host_ranks"
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _introduce(self, address: Address) -> tuple[Channel, dict[str, Any]]:
        def hello() -> dict[str, Any]:
            own = {"rank": self.rank, "size": self.size, "host": socket.gethostname(), "pid": os.getpid()}
            return own if self._facts is None else own | {"facts": {**self._facts, "clock": time.time()}}

        seconds = iter([Seconds.CONNECT])  # wait only once: later the launcher is gone, or takes no more ranks
        try:
            return introduce(lambda: connect(address, timeout=next(seconds, 0.0)), address.token, hello, Seconds.ADMIT)
        except Impostor:
            raise LaunchError("The launcher must prove that it knows the job's token. It did not.") from None
        except OSError as error:
            raise LaunchError(f"The launcher must admit a rank's process. Received: {error}.") from None

    def _on_sigterm(self, *_: object) -> None:
        # On several hosts, a job that continues without lost ranks may also continue without the rank's starter, so the
        # launcher decides.
        self._terminated = not self._welcome["regroups"] or self._facts is None

    def run(self) -> int:
        """Serves until the launcher says goodbye. Returns the exit status of the program."""
        status = 1
        try:
            self._prepare(self._welcome)
            while self._program is None and not (self._terminated or self._may_exit or self._channel.closed):
                self._serve(1.0)
            if self._program is not None:
                status = self._watch(self._program)
        finally:
            if self._mark:  # set once the directory exists
                kill_marked(self._mark)
                shutil.rmtree(self._run_dir, ignore_errors=True)
                # If the launcher is gone, nobody else removes the folder, so wait for mpirun, which is about to end.
                patience = Seconds.MPIRUN_END if self._stopped_by == _LOSS else 0.0
                job_folder.remove_job_folder(self._run_dir.parent, patience)
                # A launcher that is gone does not restart the job; one that cannot be reached may.
                if self._job_dir is not None and not (self._keep_job_dir or self._channel.timed_out):
                    shutil.rmtree(self._job_dir, ignore_errors=True)
        return status if status >= 0 else 128 - status

    def _watch(self, program: RankProgram) -> int:
        """Serves until the program has ended and all its output is sent, then reports. Returns its status."""
        while (status := program.poll()) is None:
            self._serve(5.0)
        self._kill_at = None
        self._drain(program)
        program.kill_rest(self._mark)
        self._drain(program)
        assert self._link is not None
        self._report(self._link.drain())
        self._channel.send(Kind.EXIT, {"status": status, "stopped_by": self._stopped_by})
        self._wait_for_bye()
        return 0 if self._job_continues else status  # on a failure the starter would end the other ranks

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _serve(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for an event, and handles it."""
        program, channel = self._program, self._channel
        sources: list[Source] = [(self._signals.fileno(), READ, bool)]
        if not channel.closed:
            sources.append((channel.fileno(), channel.events, self._receive))
        if self._link is not None and channel.backlog < _LINK_BACKLOG_BYTES:
            sources += self._link.sources(self._report)
        if program is not None and channel.backlog < _BACKLOG_BYTES:
            # With a full backlog the program blocks, as with a slow terminal.
            sources += [(fd, READ, partial(self._pass_on, program, fd)) for fd in program.sources]
        if program is not None and program.stdin is not None and program.wants_stdin:
            sources.append((program.stdin, WRITE, partial(self._feed, program)))
        if self._kill_at is not None:
            timeout = min(timeout, max(0.0, self._kill_at - time.monotonic()))
        serve(timeout, sources)
        for signum in self._signals.take():
            self._signal(signum)
        if self._terminated and self._stopped_by is None:
            self._stop(signal.SIGTERM, Seconds.MPIRUN_GRACE, self._starter)
        if self._channel.closed and self._stopped_by is None:
            self._report_lost_launcher()
            self._stop(signal.SIGTERM, Seconds.MPIRUN_GRACE, _LOSS)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            self._signal(signal.SIGKILL)

    def _receive(self) -> None:
        self._channel.write()
        for kind, payload in () if self._channel.closed else self._channel.read():
            self._handle(kind, payload)

    def _pass_on(self, program: RankProgram, fd: int) -> None:
        kind = program.sources[fd]
        if data := program.read(fd):
            self._channel.send(kind, data)

    def _feed(self, program: RankProgram) -> None:
        self._channel.send(Kind.STDIN_CONSUMED, {"bytes": program.feed()})

    def _report_lost_launcher(self) -> None:
        if not self._welcome["regroups"] or self._facts is None:
            return
        with contextlib.suppress(OSError):  # the reader of stderr may be gone, too
            print(
                f"keras-ddl: rank {self.rank} on host {socket.gethostname()} has lost its connection with the "
                "launcher. This rank ends. If the launcher is still running, the other ranks continue without this "
                "one.",
                file=sys.stderr,
                flush=True,
            )

    def _handle(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.START:
            self._start()
        elif kind is Kind.STDIN and self._program is not None:
            if dropped := self._program.queue_stdin(payload):
                self._channel.send(Kind.STDIN_CONSUMED, {"bytes": dropped})
        elif kind is Kind.TERMINAL_SIZE and self._program is not None:
            self._program.set_terminal_size(**json.loads(payload))
        elif kind is Kind.STOP:
            order = json.loads(payload)
            self._stop(order["signal"], order["grace_seconds"], "the launcher")
        elif kind is Kind.SIGNAL:
            self._signal(json.loads(payload)["signal"])
        elif kind in TO_PROGRAM and self._link is not None:
            self._report(self._link.take(kind, payload))
        elif kind is Kind.BYE:
            goodbye = json.loads(payload)
            self._may_exit, self._job_continues = True, goodbye["job_continues"]
            self._keep_job_dir = not goodbye["last"]

    def _prepare(self, welcome: dict[str, Any]) -> None:
        folder = job_folder.on_this_host(welcome["job"])
        self._run_dir = job_folder.make_for_rank(folder, self.rank)
        self._mark = f"KERAS_DDL_RUN_DIR={self._run_dir}\0"  # ends with \0, so that rank-1 does not match rank-10
        if (joined := config.get("HOST_RANK")) is not None:  # the previous last rank may just have removed the folder
            job_folder.make(Path(joined[2]))
        if welcome["kept"]:
            self._job_dir = job_folder.make(job_folder.on_this_host(welcome["kept"]))
        self._link = WrapperLink(self._run_dir, welcome["of_job"])

    def _start(self) -> None:
        welcome, host = self._welcome, socket.gethostname()
        environment = rank_environment.merge(os.environ, welcome["environment"], same_host=welcome["host"] == host)
        rank_environment.set_task(environment, self.rank, self.size)
        if config.get("HOST_RANK") is not None:
            rank_environment.without_mpi(environment, self.rank, self.size)
        environment["KERAS_DDL_RUN_DIR"] = str(self._run_dir)
        rank_environment.prepare_start(environment, is_spare=self.rank >= self.size)
        if self._job_dir is not None:
            environment["KERAS_DDL_JOB_DIR"] = str(self._job_dir)
        if self.rank != 0:
            # TensorFlow's INFO messages are shown for rank 0 only; warnings and errors for all ranks.
            environment.setdefault(startup_notes.LEVEL, "1")
        try:
            self._program = RankProgram(
                self.command,
                environment,
                require_directory(welcome["directory"], host),
                # If rank 0 may be lost, any rank may have to replace it on the screen.
                screen=welcome["terminal"] if self.rank == 0 or welcome["regroups"] else {},
                reads_stdin=self.rank == 0 and welcome["stdin"],
            )
            self._channel.send(Kind.STARTED, {"pid": self._program.pid})
        except OSError as error:
            text = f"The program must be one that host {host} can execute. Received: {error}."
            report = {"rank": self.rank, "host": host, "time": time.time(), "type": "LaunchError"}
            report |= {"summary": f"LaunchError: {text}", "traceback": f"LaunchError: {text}\n"}
            self._report([(Kind.REPORT, report), (Kind.EXIT, {"status": 126, "stopped_by": None})])
            self._wait_for_bye()

    def _report(self, frames: Iterable[Frame]) -> None:
        """Sends frames to the launcher."""
        for kind, message in frames:
            self._channel.send(kind, message)

    def _stop(self, signum: int, grace_seconds: float, who: str) -> None:
        # A later order can only make the program end sooner.
        self._stopped_by = self._stopped_by or who
        kill_at = time.monotonic() + grace_seconds
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)
        self._signal(signum)

    def _signal(self, signum: int) -> None:
        if self._program is not None:
            self._program.signal(signum)

    # ---- the end -------------------------------------------------------------------------------------------------

    def _drain(self, program: RankProgram) -> None:
        """Forwards the rest of the output, for a limited time, because processes left behind may keep pipes open."""
        deadline = time.monotonic() + Seconds.DRAIN
        while program.sources and time.monotonic() < deadline and not self._channel.closed:
            self._serve(Seconds.DRAIN)
            if self._channel.backlog >= _BACKLOG_BYTES:
                deadline = time.monotonic() + Seconds.DRAIN  # wait for a slow reader, but not for an open pipe

    def _wait_for_bye(self) -> None:
        # The other ranks may need some time to notice that this rank is lost, and to continue.
        deadline = time.monotonic() + (float("inf") if self._welcome["regroups"] else Seconds.GOODBYE)
        while not self._may_exit and not self._channel.closed and time.monotonic() < deadline:
            self._serve(1.0)
        self._may_exit = True


def run_wrapper(command: list[str], parent: int) -> int:
    """Runs the wrapper in a process just forked from `parent`; returns its exit status."""
    os.setpgid(0, 0)
    die_with_parent(signal.SIGTERM, parent)
    try:
        rank, size = rank_environment.rank_and_size(os.environ)
        address = Address.parse(config.get("LAUNCHER") or "")
        with Interrupts(FOR_THE_PROGRAM, lambda: None) as signals:
            return RankProcess(rank, size, address, command, signals).run()
    except KerasDdlError as error:
        print(f"keras-ddl: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
