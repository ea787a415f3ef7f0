"""Runs trainings that take turns, one epoch at a time, on ranks of this machine and in the emulated cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from translation import corpus

EXAMPLES = Path(__file__).resolve().parents[2]
LONGEST = 3600  # seconds that a study may take


class Training:
    """A job of `_step_time.py` on `ranks` ranks. As a context manager, ends the job after the block."""

    def __init__(self, directory: Path, ranks: int, chosen: Any) -> None:
        """Makes a corpus with equally many phrases per rank, so that the steps do not depend on the number of ranks.

        Args:
            directory: a directory for this job alone.
            chosen: options with model, tokens (per rank and step), pairs (of phrases per rank and epoch), and rounds.
        """
        self.ranks, self._directory, self._log = ranks, directory, directory / "log"
        files = corpus.make(directory, train=ranks * chosen.pairs, dev=1, test=1)["train"]
        self._epoch_words = sum(len(path.read_text().split()) for path in files)
        self._epochs: list[dict[str, Any]] = []
        options = ["--model", chosen.model, "--tokens", chosen.tokens, "--epochs", 1 + chosen.rounds]
        self._program = [sys.executable, "-m", "translation.studies._step_time", directory, *options]

    def start(self, words: Sequence[str], there: Callable[[list[str]], Sequence[str]] = list) -> None:
        """Starts the job. words: options of keras-ddl run. there: makes a command run on another host."""
        # With a timeout, so that the job ends even if this process is killed and gives it no more turns.
        words = [*words, "--timeout", str(LONGEST), "--"]
        command = [sys.executable, "-m", "keras_ddl.cli", "run", *words, *map(str, self._program)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                there(command),
                cwd=EXAMPLES,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()  # keras-ddl run ends its ranks
            self._process.wait()

    def allow(self) -> None:
        """Lets the job train its next epoch."""
        (self._directory / f"turn-{len(self._epochs)}").touch()

    def wait(self) -> None:
        """Waits for the end of the epoch.

        Raises: SystemExit: the job ended earlier; the message contains its output.
        """
        file = self._directory / f"epoch-{len(self._epochs)}.json"
        while not file.exists():
            if self._process.poll() is not None and not file.exists():
                raise SystemExit(f"A training on {self.ranks} rank(s) has failed:\n{self._log.read_text()}")
            time.sleep(0.02)
        self._epochs.append(json.loads(file.read_text()))

    @property
    def seconds(self) -> float:
        """Seconds per step: the median over all epochs except the first, which includes tracing."""
        return statistics.median(epoch["seconds"] / epoch["steps"] for epoch in self._epochs[1:])

    @property
    def words(self) -> float:
        """Average number of words per step, of both languages and all ranks."""
        return self._epoch_words / self._epochs[0]["steps"]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, as float32."""
        return self._epochs[0]["gradient_bytes"]


def run(folder: Path, chosen: Any) -> tuple[dict[int, Training], dict[int, Training], str | None]:
    """Starts all trainings at once. After their first epochs, only one of them computes at a time.

    Args:
        folder: a folder for temporary files.
        chosen: options as for Training; `ranks` and `hosts` have a number for each training, and `rate` is the rate of
            the hosts' links.
    Returns: ranks -> training on this machine, hosts -> training on emulated hosts, and why no hosts were emulated.
    """
    here, there, unavailable = {}, {}, None
    with contextlib.ExitStack() as stack:
        for ranks in chosen.ranks:
            here[ranks] = stack.enter_context(_started(folder / f"{ranks}-ranks", ranks, chosen, ["-np", str(ranks)]))
        if chosen.hosts:
            try:
                cluster = stack.enter_context(_emulated_cluster().EmulatedCluster(max(chosen.hosts), chosen.rate))
            except (OSError, RuntimeError) as error:
                unavailable = str(error)
            else:
                # The hosts share the cores, so MPI must not spin. All processes must be in one session (benchmarks/).
                mpi = f"--prtemca plm_ssh_agent {cluster.agent} --mca mpi_yield_when_idle 1 --leave-session-attached"
                for hosts in chosen.hosts:
                    words = ["--hosts", ",".join(f"{host}:1" for host in cluster.hosts[:hosts]), "--mpi-arg", mpi]
                    there[hosts] = stack.enter_context(
                        # The agent passes its arguments to a shell, like ssh, so they need quotes.
                        _started(
                            folder / f"{hosts}-hosts",
                            hosts,
                            chosen,
                            words,
                            lambda command: cluster.command("h0", [f"'{word}'" for word in command]),
                        )
                    )
        trainings = [*here.values(), *there.values()]
        for training in trainings:
            training.allow()
        for training in trainings:
            training.wait()
        for _ in range(chosen.rounds):
            for training in trainings:
                training.allow()
                training.wait()
    return here, there, unavailable


def _started(directory: Path, ranks: int, chosen: Any, *how: Any) -> Training:
    training = Training(directory, ranks, chosen)
    training.start(*how)
    return training


def _emulated_cluster() -> ModuleType:
    path = EXAMPLES.parent / "tools" / "emulated_cluster.py"
    if not path.exists():
        raise OSError(f"the emulated cluster needs a checkout of the repository: there is no {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
