"""Runs a program as one process, or as ranks of this host, and records its training."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_ddl.launch import job as job_module
from keras_ddl.launch.job import JobResult
from keras_ddl.launch.output.screen import Screen
from keras_ddl.launch.rank.rank_environment import python_path
from keras_ddl.launch.restarts import RestartLoop
from keras_ddl.verify import working_copy
from keras_ddl.verify.recording import STARTED_FILE, Plan, Recording

_ERROR_CHARACTERS = 1000


class _Nowhere:
    """A sink (launch/output/sinks.py) that shows nothing, because each rank's output is in a file."""

    terminal = False

    def write(self, data: bytes) -> None:
        pass


@dataclass(frozen=True)
class Program:
    """The program to verify.

    Attributes:
        command: command line of every process.
        timeout: seconds for each run.
        epoch_steps: limit on the batches of an epoch, evaluation or prediction of Keras; 0: none.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    timeout: float
    epoch_steps: int
    verbose: bool = False


@dataclass(frozen=True)
class Run:
    """One run that has ended.

    Attributes:
        output: the folder of the ranks' output.
        linked: as in WorkingCopy.
    """

    result: JobResult
    recording: Recording
    seconds: float
    output: Path
    imported_strategy: bool
    linked: tuple[str, ...] = ()

    @property
    def ended_well(self) -> bool:
        return self.result.ok

    @property
    def failure(self) -> str:
        """Why the run failed, in one line; "" if it ended well."""
        if self.result.ok:
            return ""
        if self.result.timed_out:
            return "ended after --timeout"
        first = self.result.first_failure
        if first is None:
            return self.result.failure_text.strip() or "it ended early"
        return " ".join(first.full_error.split())[:_ERROR_CHARACTERS] or first.describe()


def _defaults(program: Program) -> dict[str, str]:
    """Returns the variables to set unless this process's environment, which ranks inherit, has them."""
    chosen = {"KERAS_MAX_STEPS_PER_EPOCH": str(program.epoch_steps)} if program.epoch_steps else {}
    return {name: value for name, value in chosen.items() if name not in os.environ}


def run(program: Program, ranks: int, plan: Plan, folder: Path) -> Run:
    """Runs a program in a copy of the working directory, and returns the run with its recording.

    Raises: LaunchError: the ranks could not be started. ConfigError: the working directory cannot be copied.
        KeyboardInterrupt: it was interrupted.
    """
    recorded, output = folder / "recording", folder / "output"
    plan.write(recorded)
    copy = working_copy.make(Path.cwd(), folder / "files", (folder, folder.parent))
    start = str(Path(__file__).parent / "start")
    environment = {
        **_defaults(program),
        **program.environment,
        "KERAS_DDL_VERIFY_DIR": str(recorded),
        "PYTHONPATH": ":".join(filter(None, (start, program.environment.get("PYTHONPATH", python_path())))),
        "PWD": str(copy.directory),
    }
    job = job_module.make(
        program.command,
        num_ranks=ranks,
        env=environment,
        timeout=program.timeout,
        output_dir=output,
        directory=str(copy.directory),
    )
    began = time.monotonic()
    shown = Screen(_Nowhere(), _Nowhere(), shows_notes=False)
    if program.verbose:
        from keras_ddl.launch.output.sinks import FileDescriptorSink

        shown = Screen(FileDescriptorSink(2), FileDescriptorSink(2))
    result = RestartLoop(job, shown).run((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    if result.signal is not None:
        raise KeyboardInterrupt
    is_started = (recorded / STARTED_FILE).exists()
    return Run(result, Recording(recorded), time.monotonic() - began, output, is_started, copy.linked)
