"""The process that mpirun starts for each rank. It runs the program and reports to the launcher:

    python -m keras_ddl.launch.rank_process -- python train.py ...

The program's output goes to the launcher over the rank's connection (rank 0 writes to a pseudo-terminal when the
launcher's own output is a terminal). When the program ends, what it left running is killed and its exit status and
error report are sent. When the launcher says so, mpirun says so, or the launcher disappears, the program is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keras_ddl.errors import KerasDdlError, LaunchError
from keras_ddl.launch import rank_environment, terminal
from keras_ddl.launch.control import (
    CALL_FILE,
    FILE_CHUNK_BYTES,
    RESULT_FILE,
    Address,
    Channel,
    Kind,
    connect,
    proof,
    same_proof,
)
from keras_ddl.launch.processes import die_with_parent, kill_marked, signal_quietly

# Open MPI follows its SIGTERM with SIGKILL after one second. By then the program must be gone and reported.
_MPIRUN_GRACE_SECONDS = 0.4
_DRAIN_SECONDS = 0.3
_FAREWELL_SECONDS = 15.0
_BACKLOG_BYTES = 1 << 20
_REPORT_BYTES = 1 << 20
_OUTPUT_BYTES = 1 << 16


class RankProcess:
    """One rank: its connection, its program, and the loop that serves both, which waits in poll and nowhere else."""

    def __init__(self, rank: int, size: int, address: Address, command: list[str]) -> None:
        self.rank, self.size, self.command = rank, size, command
        self._token = address.token
        self._nonce = secrets.token_bytes(32)
        self._channel = Channel(connect(address))
        self._welcome: dict[str, Any] = {}
        self._run_dir = Path()
        self._mark = ""
        self._call_file: Any = None
        self._child: subprocess.Popen[bytes] | None = None
        self._sources: dict[int, Kind] = {}
        self._terminals: list[int] = []
        self._stdin: int | None = None
        self._stdin_backlog = bytearray()
        self._stdin_ended = False
        self._stopped_by: str | None = None
        self._kill_at: float | None = None
        self._told_to_leave = False
        self._terminated = False
        self._wakeup, wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_writer.setblocking(False)
        self._wakeup_writer = wakeup_writer
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # mpirun passes these on from a terminal; the launcher decides what they mean.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, self._on_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True

    def run(self) -> int:
        """Serves until the launcher says goodbye. Returns the exit status of the program."""
        try:
            while self._child is None and not (self._channel.closed or self._terminated or self._told_to_leave):
                self._serve(1.0)
            status = self._watch() if self._child is not None else 1
        finally:
            if self._welcome:
                kill_marked(self._mark)
                shutil.rmtree(self._run_dir, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self._run_dir.parent.rmdir()  # the last rank of this host removes it
        return status if status >= 0 else 128 - status

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _serve(self, timeout: float) -> None:
        """Waits for one thing to happen, or `timeout` seconds, and handles it."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if not self._channel.closed:
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.backlog else 0))
        if self._channel.backlog < _BACKLOG_BYTES:  # otherwise the program waits, as it would for a slow terminal
            for fd in self._sources:
                poll.register(fd, select.POLLIN)
        if self._stdin is not None and (self._stdin_backlog or self._stdin_ended):
            poll.register(self._stdin, select.POLLOUT)
        if self._kill_at is not None:
            timeout = min(timeout, max(0.0, self._kill_at - time.monotonic()))
        for fd, _ in poll.poll(timeout * 1000):
            if fd == self._wakeup.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
            elif fd == self._stdin:
                self._feed_stdin()
            elif fd in self._sources:
                self._forward(fd)
            elif not self._channel.closed and fd == self._channel.fileno():
                self._channel.write()
                if not self._channel.closed:
                    for kind, payload in self._channel.read():
                        self._handle(kind, payload)
        if self._terminated and self._stopped_by is None:
            self._stop(signal.SIGTERM, _MPIRUN_GRACE_SECONDS, "mpirun")
        if self._channel.closed and self._stopped_by is None:
            self._stop(signal.SIGTERM, _MPIRUN_GRACE_SECONDS, "the loss of the launcher")
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            self._signal(signal.SIGKILL)

    def _handle(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.NONCE:
            hello = {"proof": proof(self._token, "rank", payload), "nonce": self._nonce.hex(), "rank": self.rank}
            hello |= {"size": self.size, "host": socket.gethostname(), "pid": os.getpid()}
            self._channel.send(Kind.HELLO, hello)
        elif kind is Kind.WELCOME:
            self._prepare(json.loads(payload))
        elif not self._channel.proven:
            raise LaunchError("The launcher must prove that it knows the job's token first. It did not.")
        elif kind is Kind.FILE:
            self._call_file.write(payload)
            if not payload:
                self._call_file.close()
        elif kind is Kind.START:
            self._start()
        elif kind is Kind.STDIN:
            self._stdin_backlog += payload
            self._stdin_ended = self._stdin_ended or not payload
            if self._stdin is None:  # the program has closed it
                self._channel.send(Kind.STDIN_TAKEN, {"bytes": len(payload)})
        elif kind is Kind.TERMINAL_SIZE:
            size = json.loads(payload)
            for fd in self._terminals:
                terminal.set_size(fd, size["rows"], size["columns"])
        elif kind is Kind.STOP:
            order = json.loads(payload)
            self._stop(order["signal"], order["grace_seconds"], "the launcher")
        elif kind is Kind.BYE:
            self._told_to_leave = True

    # ---- the program ---------------------------------------------------------------------------------------------

    def _prepare(self, welcome: dict[str, Any]) -> None:
        if not same_proof(str(welcome.get("proof")), proof(self._token, "launcher", self._nonce)):
            raise LaunchError("The launcher must prove that it knows the job's token. The proof received is wrong.")
        self._channel.proven = True
        self._welcome = welcome
        job_dir = Path(tempfile.gettempdir()) / f"keras_ddl-{welcome['job']}"
        job_dir.mkdir(mode=0o700, exist_ok=True)
        self._run_dir = job_dir / f"rank-{self.rank}"
        self._run_dir.mkdir(mode=0o700)
        self._mark = f"KERAS_DDL_RUN_DIR={self._run_dir}\0"  # with the end of the variable: rank-1 is not rank-10
        if welcome["sends_file"]:
            self._call_file = (self._run_dir / CALL_FILE).open("wb")

    def _start(self) -> None:
        welcome = self._welcome
        environment = rank_environment.merge(
            os.environ, welcome["environment"], same_host=welcome["host"] == socket.gethostname()
        )
        environment["KERAS_DDL_RUN_DIR"] = str(self._run_dir)
        screen = welcome["terminal"] if self.rank == 0 else {}
        ends = []
        for kind, name in ((Kind.OUT, "stdout"), (Kind.ERR, "stderr")):
            if screen.get(name):
                ours, theirs = terminal.open_pair(screen["rows"], screen["columns"])
                self._terminals.append(ours)
            else:
                ours, theirs = os.pipe()
            os.set_blocking(ours, False)
            self._sources[ours] = kind
            ends.append(theirs)
        reads_stdin = self.rank == 0 and welcome["stdin"]
        try:
            self._child = subprocess.Popen(
                self.command,
                cwd=self._directory(welcome["directory"]),
                env=environment,
                stdin=subprocess.PIPE if reads_stdin else subprocess.DEVNULL,
                stdout=ends[0],
                stderr=ends[1],
                start_new_session=True,  # a group of its own, so that all of it can be signalled
                close_fds=False,  # MPICH hands the rank a file descriptor (PMI_FD)
                preexec_fn=_between_fork_and_exec,
            )
        except (OSError, LaunchError) as error:
            self._report_no_start(error)
        finally:
            for fd in ends:
                os.close(fd)
        if self._child is not None and self._child.stdin is not None:
            self._stdin = self._child.stdin.fileno()
            os.set_blocking(self._stdin, False)

    def _directory(self, wanted: str) -> str:
        if not Path(wanted).is_dir():
            raise LaunchError(
                f"The working directory must exist on every host. Received: {wanted!r}, which does not exist on host "
                f"{socket.gethostname()}. Start the job from a directory that the hosts share."
            )
        return wanted

    def _report_no_start(self, error: Exception) -> None:
        text = str(error)
        if not isinstance(error, LaunchError):
            text = f"The program must be one that host {socket.gethostname()} can execute. Received: {text}."
        report = {"rank": self.rank, "host": socket.gethostname(), "time": time.time(), "type": "LaunchError"}
        report |= {"traceback": f"LaunchError: {text}\n"}
        status = 127 if isinstance(error, FileNotFoundError) else 126
        self._channel.send(Kind.EXIT, {"status": status, "stopped_by": None, "report": report, "report_age_seconds": 0})
        self._say_goodbye()

    def _stop(self, signum: int, grace_seconds: float, who: str) -> None:
        # An order after an order may only make it sooner and harder.
        self._stopped_by = self._stopped_by or who
        kill_at = time.monotonic() + grace_seconds
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)
        self._signal(signum)

    def _signal(self, signum: int) -> None:
        if self._child is not None and self._child.returncode is None:
            signal_quietly(self._child.pid, signum, group=True)

    def _watch(self) -> int:
        """Serves until the program has ended and everything it wrote is sent, then reports. Returns its status."""
        child = self._child
        assert child is not None
        while child.poll() is None:
            self._serve(5.0)
        self._kill_at = None
        self._drain()
        signal_quietly(child.pid, signal.SIGKILL, group=True)
        kill_marked(self._mark)
        self._drain()
        self._send_result()
        report, age = self._read_report()
        exit_frame = {"status": child.returncode, "stopped_by": self._stopped_by, "report": report}
        self._channel.send(Kind.EXIT, exit_frame | {"report_age_seconds": age})
        self._say_goodbye()
        return child.returncode

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while not self._told_to_leave and not self._channel.closed and time.monotonic() < deadline:
            self._serve(1.0)
        self._told_to_leave = True

    # ---- streams and files ---------------------------------------------------------------------------------------

    def _forward(self, fd: int) -> None:
        try:
            data = os.read(fd, _OUTPUT_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a pseudo-terminal's way of saying that the other end is closed
            data = b""
        if data:
            self._channel.send(self._sources[fd], data)
        else:
            del self._sources[fd]
            if fd in self._terminals:
                self._terminals.remove(fd)
            os.close(fd)

    def _drain(self) -> None:
        """Forwards what is left in the pipes. Processes left behind may hold them open, so not until their end."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._sources and time.monotonic() < deadline and not self._channel.closed:
            self._serve(_DRAIN_SECONDS)
            if self._channel.backlog >= _BACKLOG_BYTES:
                deadline = time.monotonic() + _DRAIN_SECONDS  # a slow reader, not an open pipe

    def _feed_stdin(self) -> None:
        assert self._child is not None and self._child.stdin is not None and self._stdin is not None
        taken = len(self._stdin_backlog)
        try:
            if self._stdin_backlog:
                taken = os.write(self._stdin, self._stdin_backlog)
            finished = self._stdin_ended and taken == len(self._stdin_backlog)
        except BlockingIOError:
            return
        except OSError:  # the program has closed its stdin: drop what comes
            finished = True
        del self._stdin_backlog[:taken]
        self._channel.send(Kind.STDIN_TAKEN, {"bytes": taken})
        if finished:
            self._stdin = None
            with contextlib.suppress(OSError):
                self._child.stdin.close()

    def _send_result(self) -> None:
        path = self._run_dir / RESULT_FILE
        if not self._welcome["sends_file"] or not path.exists():
            return
        with path.open("rb") as file:
            while (chunk := file.read(FILE_CHUNK_BYTES)) and not self._channel.closed:
                self._channel.send(Kind.RESULT, chunk)
                while self._channel.backlog >= _BACKLOG_BYTES and not self._channel.closed:
                    self._serve(1.0)

    def _read_report(self) -> tuple[dict[str, Any] | None, float]:
        path = self._run_dir / f"error-{self.rank}.txt"
        try:
            with path.open(errors="replace") as file:
                report = json.loads(file.read(_REPORT_BYTES))
        except (OSError, ValueError):
            return None, 0.0
        if not isinstance(report, dict):
            return None, 0.0
        written = report.get("time")
        return report, max(0.0, time.time() - written) if isinstance(written, int | float) else 0.0


def _between_fork_and_exec() -> None:
    # SIGKILL: if this wrapper is killed, nobody is left to ask the program twice.
    die_with_parent(signal.SIGKILL)
    # A shell that starts jobs in the background ignores SIGINT, and Python would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def main(argv: list[str]) -> int:
    """Entry point; `argv` is ["--", program, arguments...]."""
    die_with_parent(signal.SIGTERM)
    try:
        rank, size = rank_environment.rank_and_size(os.environ)
        return RankProcess(rank, size, Address.parse(os.environ.get("KERAS_DDL_LAUNCHER", "")), argv[1:]).run()
    except KerasDdlError as error:
        print(f"keras-ddl: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
