"""Starts the processes of a peer, watches them, and restarts them if a program has ended them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _scoreboard.judge import CRASHED, HUNG, NOT_OFFERED, Outcome
from _scoreboard.peers import Peer

SECONDS_TO_START = 240
SECONDS_AFTER_ERROR = 20  # how long a process may continue after another one has raised an error


class Job:
    """One start of a peer's processes, with a list of programs."""

    def __init__(self, peer: type[Peer], python: str, programs: list[str], folder: Path, limit: float) -> None:
        self.peer, self.folder = peer, folder
        self.began = time.monotonic()
        script = str(Path(__file__).resolve().parents[1] / "scoreboard.py")
        self.output = folder / "output"
        self.processes = []
        for number, environment in enumerate(peer.environments()):
            arguments = [script, "--worker", peer.name, "--process", str(number), "--folder", str(folder)]
            arguments += ["--limit", str(limit)]
            self.processes.append(
                subprocess.Popen(
                    peer.command(python, [*arguments, "--only", *programs]),
                    env={**os.environ, **environment},
                    stdout=self.output.open("a"),
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def outcomes(self, program: str, limit: float) -> list[Outcome]:
        """Waits until all processes have run a program or no longer can."""
        files = [self.folder / f"{program}.{n}" for n in range(self.peer.processes)]
        begun, first_ended = None, None
        while True:
            ended = [each.poll() is not None for each in self.processes]  # checked before their files
            exists = [each.exists() for each in files]
            if all(exists):
                return [pickle.loads(each.read_bytes()) for each in files]
            now = time.monotonic()
            if begun is None and any((self.folder / f"{each.name}.begun").exists() for each in files):
                begun = now
            if first_ended is None and any(exists):
                first_ended = now
            failed = any(pickle.loads(file.read_bytes()).error for file, has_file in zip(files, exists) if has_file)
            late = now - begun > limit if begun else now - self.began > SECONDS_TO_START + limit
            waited = failed and first_ended is not None and now - first_ended > SECONDS_AFTER_ERROR
            # A launcher is one process for all ranks, and ends after all of them.
            finished = exists if len(ended) == len(exists) else [all(exists)]
            died = any(has_ended and not has_finished for has_ended, has_finished in zip(ended, finished))
            if died or late or waited:
                kind = CRASHED if died else HUNG
                return [
                    pickle.loads(file.read_bytes()) if has_file else Outcome(ended=kind)
                    for file, has_file in zip(files, exists)
                ]
            time.sleep(0.05)

    def end(self) -> None:
        """Ends all processes: first with SIGTERM, which lets a launcher end its ranks, then with SIGKILL."""
        for kind, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            for each in self.processes:
                if each.poll() is None or kind == signal.SIGKILL:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.pid, kind)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and any(each.poll() is None for each in self.processes):
                time.sleep(0.05)

    def last_lines(self) -> str:
        lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-40:])


def run(
    peer: type[Peer],
    python: str,
    programs: list[str],
    limit: float,
    report: Callable[[str, list[Outcome]], None],
    show_output: bool = False,
) -> dict[str, str]:
    """Runs programs under a peer, in as few starts as possible, and reports the outcome of each.

    Args:
        python: the interpreter of the peer's environment.
        limit: seconds that a program may take.
        report: called with the name of each program and the outcomes of the peer's processes.
        show_output: print the last lines of processes that died.

    Returns: the versions of the peer's packages.
    """
    left, versions = list(programs), {}
    while left:
        with tempfile.TemporaryDirectory(prefix="scoreboard-") as folder:
            job = Job(peer, python, left, Path(folder), limit)
            try:
                usable = True
                while left and usable:
                    name = left.pop(0)
                    outcomes = job.outcomes(name, limit)
                    died = any(each.ended != "equal" for each in outcomes)
                    broken = any(each.error and not each.error.startswith(NOT_OFFERED) for each in outcomes)
                    usable = not died and not (peer.fragile and broken)
                    if died and show_output:
                        print(job.last_lines(), flush=True)
                    report(name, outcomes)
                with contextlib.suppress(FileNotFoundError):
                    versions = json.loads((Path(folder) / "versions").read_text())
            finally:
                job.end()
    return versions
