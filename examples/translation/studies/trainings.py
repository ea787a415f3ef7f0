"""Starts trainings (step_time.py) on ranks here and in the emulated cluster, and keeps what they took."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from translation import corpus

EXAMPLES = Path(__file__).resolve().parents[2]


@dataclass
class Trainings:
    """Trainings of one model. Where `hosts` is 0, ranks run on this machine as it is.

    Attributes: folder: for what is written meanwhile. model, tokens, epochs: as step_time.py's options. pairs: of
        phrases a rank and epoch.
    """

    folder: Path
    model: str = "lstm"
    tokens: int = 1024
    pairs: int = 600
    epochs: int = 2
    found: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)  # by (ranks, hosts)
    _words: dict[int, int] = field(default_factory=dict)

    def run(self, ranks: int) -> None:
        """Trains once on ranks of this machine."""
        self._run(ranks, 0, ["-np", str(ranks)], list)

    def run_emulated(self, hosts: int, rate: str) -> str | None:
        """Trains once on emulated hosts of one rank. rate: as tc spells it. Returns why it could not, or None."""
        try:
            emulated = _emulated_cluster()
        except OSError as error:
            return f"the emulated cluster is part of the repository, which this is not: {error}"
        try:
            with emulated.EmulatedCluster(hosts, rate) as cluster:
                # The hosts share the cores: MPI must not spin, and all processes be in one session (see benchmarks/).
                mpi = f"--prtemca plm_ssh_agent {cluster.agent} --mca mpi_yield_when_idle 1 --leave-session-attached"
                words = ["--hosts", ",".join(f"{host}:1" for host in cluster.hosts), "--mpi-arg", mpi]
                # The agent gives its words to a shell, as ssh does.
                self._run(hosts, hosts, words, lambda command: cluster.command("h0", [f"'{w}'" for w in command]))
        except emulated.ClusterUnavailable as error:
            return str(error)
        return None

    def seconds(self, ranks: int, hosts: int = 0) -> float:
        """Returns a step's, the median of all epochs of all starts."""
        return statistics.median(
            seconds / one["steps"] for one in self.found[ranks, hosts] for seconds in one["seconds"]
        )

    def words(self, ranks: int) -> float:
        """Returns the words of a step, of both languages and all ranks, on average."""
        steps = next(ones[0]["steps"] for (number, _), ones in self.found.items() if number == ranks)
        return self._words[ranks] / steps

    @property
    def gradient_bytes(self) -> int:
        return next(iter(self.found.values()))[0]["gradient_bytes"]

    def _run(self, ranks: int, hosts: int, words: Sequence[str], there: Callable[[list[str]], Sequence[str]]) -> None:
        directory, output = self._corpus(ranks), self.folder / "found.json"
        output.unlink(missing_ok=True)
        command = [sys.executable, "-m", "keras_ddl.cli", "run", *words, "--timeout", "600", "--", sys.executable, "-m"]
        command += ["translation.studies.step_time", str(directory), "--output", str(output), "--model", self.model]
        command += ["--tokens", str(self.tokens), "--epochs", str(self.epochs)]
        done = subprocess.run(
            there(command),
            cwd=EXAMPLES,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if not output.exists():
            raise SystemExit(f"A training on {ranks} rank(s) failed ({done.returncode}):\n{done.stdout}{done.stderr}")
        self.found.setdefault((ranks, hosts), []).append(json.loads(output.read_text()))

    def _corpus(self, ranks: int) -> Path:
        """Returns a directory of as many phrases for each rank: steps are as many, and as long, on any number."""
        directory = self.folder / f"corpus-{ranks}"
        if not directory.exists():
            files = corpus.make(directory, train=ranks * self.pairs, dev=1, test=1)["train"]
            self._words[ranks] = sum(len(path.read_text().split()) for path in files)
        return directory


def _emulated_cluster() -> ModuleType:
    path = EXAMPLES.parent / "benchmarks" / "_emulated_cluster.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
