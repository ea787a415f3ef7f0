"""Verifies a program: runs it several times and derives the verdict."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl.verify import compare, runs
from keras_ddl.verify.compare import Judgement
from keras_ddl.verify.recording import Plan
from keras_ddl.verify.runs import Program, Run

EQUAL, DIFFERENT, UNKNOWN = "equal", "different", "unknown"
EXIT_STATUS = {EQUAL: 0, DIFFERENT: 1, UNKNOWN: 2}


@dataclass
class Precision:
    """The result in one precision.

    Attributes:
        floatx: "float64", or "" if the program chooses.
        verdict: EQUAL, DIFFERENT or UNKNOWN.
        why: the reason for the last two, in words.
        one, ranks, last_bit, again: the runs of one process, of the ranks, of one process with weights perturbed by one
            ulp, and of one process a second time; None: not made.
        is_deterministic: whether two runs of one process were equal; None: not tried.
        ranks_equal: whether all ranks had the same bits after each event.
    """

    floatx: str
    verdict: str = UNKNOWN
    why: str = ""
    one: Run | None = None
    ranks: Run | None = None
    last_bit: Run | None = None
    again: Run | None = None
    judgement: Judgement | None = None
    is_deterministic: bool | None = None
    ranks_equal: bool | None = None

    @property
    def has_trained(self) -> bool:
        """Whether one process trained, and ended well."""
        return self.one is not None and self.one.ended_well and self.one.recording.steps > 0

    @property
    def is_doubtful(self) -> bool:
        """Whether chance, or a later run that failed, casts doubt on EQUAL in another precision."""
        is_early = any(run is not None and not run.ended_well for run in (self.ranks, self.last_bit))
        return self.is_deterministic is False or is_early

    @property
    def dtypes(self) -> list[str]:
        return [] if self.one is None else list(self.one.recording.facts.get("dtypes", ()))


@dataclass
class Verification:
    """The result of all runs."""

    num_ranks: int
    steps: int
    seed: int
    precisions: list[Precision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """DIFFERENT if ranks differ in any precision; EQUAL if they are equal in one and nothing casts doubt on it."""
        verdicts = [each.verdict for each in self.precisions]
        is_doubtful = any(each.is_doubtful for each in self.precisions)
        return DIFFERENT if DIFFERENT in verdicts else EQUAL if EQUAL in verdicts and not is_doubtful else UNKNOWN

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the ranks have recorded about the run; {} if none has."""
        for each in self.precisions:
            if each.ranks is not None and each.ranks.recording.facts:
                return each.ranks.recording.facts
        one = self.precisions[0].one if self.precisions else None
        return {} if one is None else one.recording.facts


class Verifier:
    """Makes the runs. progress: shows a line of text."""

    def __init__(
        self, program: Program, num_ranks: int, steps: int, seed: int, folder: Path, progress: Callable[[str], None]
    ) -> None:
        self._program, self._folder, self._progress = program, folder, progress
        self._result = Verification(num_ranks, steps, seed)
        self._number = 0

    def verify(self, precisions: tuple[str, ...]) -> Verification:
        """Verifies the program. precisions: "" (the program's own), "float64".

        Raises: LaunchError: ranks could not be started. ConfigError: the working directory cannot be copied.
            KeyboardInterrupt.
        """
        cores = len(os.sched_getaffinity(0))
        if self._result.num_ranks > cores:
            self._note(f"{self._result.num_ranks} ranks share {cores} cores: results are the same, but runs are slow")
        for floatx in precisions:
            if floatx and any(each.dtypes == [floatx] for each in self._result.precisions):
                continue  # the program itself chose float64
            made = Precision(floatx)
            self._result.precisions.append(made)
            self._verify(made)
            if not floatx and (made.one is None or not made.has_trained or made.is_deterministic is False):
                break  # another precision would fail in the same way
        return self._result

    def _verify(self, made: Precision) -> None:
        """Runs one precision in one process and on ranks, and judges the difference."""
        made.one = one = self._run("one process", 1, made)
        if not one.recording.steps:
            made.why = _why_nothing(one)
            return
        if not one.ended_well:
            made.why = f"one process failed after {one.recording.steps} training steps: {one.failure}"
            if one.result.timed_out:
                made.why += "; raise --timeout, or lower --steps"
            return
        self._check_memory(one)
        made.ranks = ranks = self._run(f"{self._result.num_ranks} ranks", self._result.num_ranks, made)
        if ranks.recording.events:
            made.last_bit = self._run("one process, weights perturbed by one ulp", 1, made, last_bit=True)
        last_bit = None if made.last_bit is None else made.last_bit.recording
        epsilon, compute_epsilon = (float(one.recording.facts[name]) for name in ("epsilon", "compute_epsilon"))
        made.judgement = judgement = compare.judge(one.recording, ranks.recording, last_bit, epsilon, compute_epsilon)
        differ = ranks.recording.ranks_differ(self._result.num_ranks)
        made.ranks_equal = not differ if ranks.recording.events else None
        made.verdict, made.why = judgement.verdict, _why(judgement)
        if not ranks.ended_well:
            made.verdict, made.why = self._verdict_on_failed_ranks(made, one, ranks)
        elif made.verdict == EQUAL and differ:
            made.verdict, made.why = DIFFERENT, f"ranks differ among themselves: {differ}"
        elif made.verdict != DIFFERENT:
            made.verdict, made.why = _verdict_by_counts(made, one, ranks)
        if made.verdict != EQUAL:
            self._check_deterministic(made, one, epsilon)

    def _verdict_on_failed_ranks(self, made: Precision, one: Run, ranks: Run) -> tuple[str, str]:
        """Returns the verdict on ranks that did not end like one process, and why."""
        if not ranks.result.timed_out:
            return DIFFERENT, f"the ranks ended with an error that one process does not have: {ranks.failure}"
        if made.verdict == DIFFERENT:
            return made.verdict, f"{made.why}; then they were ended after --timeout"
        return UNKNOWN, (
            f"the ranks were ended after --timeout, with {ranks.recording.steps} training steps of the "
            f"{one.recording.steps} that one process did in {one.seconds:.0f} s: they wait for each other, or need "
            "more time; raise --timeout to find out"
        )

    def _check_deterministic(self, made: Precision, one: Run, epsilon: float) -> None:
        """Runs one process again before the ranks are blamed."""
        made.again = again = self._run("one process, a second time", 1, made)
        first = compare.first_difference(one.recording, again.recording, epsilon)
        made.is_deterministic = first is None
        if first is not None:
            what = first.apart or f"{first.farthest} by {first.largest:.1e}"
            before = f" (the ranks: {made.why})" if made.why else ""
            made.verdict = UNKNOWN
            made.why = (
                "the program is not deterministic: two runs in one process, with the same seed, differ after step "
                f"{first.event.step} in {what}{before}"
            )

    def _run(self, what: str, ranks: int, made: Precision, *, last_bit: bool = False) -> Run:
        self._number += 1
        name = made.floatx or "own precision"
        result = self._result
        folder = self._folder / f"run-{self._number}"
        plan = Plan(result.steps, made.floatx, result.seed, last_bit)
        self._progress(f"run {self._number}: {what}, {name} ...")
        run = runs.run(self._program, ranks, plan, folder)
        shutil.rmtree(folder / "files", ignore_errors=True)
        if run.linked:
            links = ", ".join(run.linked)
            self._note(f"links to directories outside were not copied, so files written there stay: {links}")
        end = f", then: {run.failure}" if run.failure else ""
        self._progress(f"run {self._number}: {run.recording.steps} training steps in {run.seconds:.0f} s{end}")
        return run

    def _check_memory(self, one: Run) -> None:
        needed = int(one.recording.facts.get("peak_bytes", 0)) * self._result.num_ranks
        available = _available_bytes()
        if available is not None and needed > available:
            self._note(
                f"one process used {needed / self._result.num_ranks / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB "
                f"are free: {self._result.num_ranks} ranks may not fit"
            )

    def _note(self, text: str) -> None:
        if text not in self._result.notes:
            self._result.notes.append(text)
            self._progress(text)


def _verdict_by_counts(made: Precision, one: Run, ranks: Run) -> tuple[str, str]:
    """Returns the verdict if no compared value differs: all runs must have ended well after equally many steps."""
    bits = made.last_bit
    counts = len(one.recording.events), len(ranks.recording.events)
    if bits is not None and not bits.ended_well:
        return UNKNOWN, f"one process with weights perturbed by one ulp failed: {bits.failure}"
    if bits is not None and len(bits.recording.events) != counts[0]:
        return UNKNOWN, (
            f"rounding changes how long the program trains: one process recorded {counts[0]} steps, epochs and "
            f"predictions, and {len(bits.recording.events)} with weights perturbed by one ulp"
        )
    if counts[0] != counts[1]:
        return DIFFERENT, f"one process recorded {counts[0]} steps, epochs and predictions, rank 0 {counts[1]}"
    return made.verdict, made.why


def _why_nothing(one: Run) -> str:
    """Returns why no training step was recorded."""
    if one.result.timed_out:
        return (
            "one process trained no step before --timeout; its work before the first step (reading data?) takes longer"
        )
    if not one.imported_strategy:
        after = f"; it ended with: {one.failure}" if one.failure else ""
        return f"the program makes no keras_ddl.Strategy, so there is nothing to compare{after}"
    if one.failure:
        return f"one process trained no step: {one.failure}"
    return (
        "the program ended without a training step of fit, train_on_batch or strategy.function; your own "
        "function in strategy.run is not compared"
    )


def _why(judgement: Judgement) -> str:
    row = judgement.first_beyond
    if row is not None and row.ranks.apart:
        return f"after step {row.event.step} the ranks did something else: {row.ranks.apart}"
    if row is not None:
        name, far = row.beyond[0]
        where = f"at step {row.event.step}" if row.event.kind == "step" else f"after step {row.event.step}"
        others = f", and {len(row.beyond) - 1} more" if len(row.beyond) > 1 else ""
        limit = row.limits[name]
        return f"{where} ({row.event.label}) {name} differs by {far:.1e} where rounding allows {limit:.1e}{others}"
    if judgement.useless_from is not None and not judgement.steps:
        return (
            f"rounding alone may change the weights by more than {compare.USELESS:g} at step "
            f"{judgement.useless_from.step}: it hides differences of the ranks"
        )
    return "" if judgement.steps else "no training step could be compared"


def _available_bytes() -> int | None:
    """Returns the free memory of this host; None: unknown, because there is no /proc/meminfo."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    of = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(of["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in of else None
