"""Describes how the ranks of a job ended, and finds the rank that failed first."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl.errors import are_alike
from keras_ddl.link import last_checkpoint
from keras_ddl.link.program import RESTART_STATUS

_LAST_LINE = re.compile(r"^(?:\s*\|? ?)([A-Za-z_][\w.]*)(?::\s?(.*))?$")
# The MPI library adds these to a rank's stderr when the rank aborts.
_BOILERPLATE = re.compile(r"^(Abort\(\d+\) on node|application called MPI_Abort|internal ABORT|\[unset\]|-{20,}$)")
# Blocks of mpirun's output (between rulers) that only say that a rank has failed.
_RULER = re.compile(r"^\s*[-=]{20,}\s*$", re.MULTILINE)
_ROUTINE = re.compile(
    r"MPI_ABORT was invoked|prterun has exited due to process rank|exited with non-zero status|"
    r"prterun noticed that process rank|exited on signal|BAD TERMINATION OF ONE|YOUR APPLICATION TERMINATED WITH"
)
# How long the other ranks may take to fail on their own after a first failure.
_CASCADE_SECONDS = 2.0  # ranks of one host hit the same error within a second or two
_CASCADE_BEFORE_CAUSE_SECONDS = 3.0  # the report of the cause must still arrive
_CASCADE_WITHOUT_MPI_SECONDS = 10.0  # the same without MPI, whose ranks wait for the cause (error_report.py)
_CASCADE_OF_RESTART_SECONDS = 10.0  # all end at once, but shutting down TensorFlow may take seconds
_SUMMARY_CHARACTERS = 300
_MIDDLE = "ended with status 0 in the middle of the job (sys.exit or os._exit?)"
_LAST_CHARACTERS = 1000  # leaves room for the remedy in the last line
_TAIL_LINES = 15


@dataclass
class RankOutcome:
    """The end of one rank.

    status: exit status; negative for a signal; None: the rank never reported its end.
    stopped_by: what ended it ("the launcher", "mpirun", "the loss of the launcher"); None: it ended by itself.
    job_continues: the other ranks went on without it (membership.py), so its end is no failure of the job.
    in_job: its program ended without keras_ddl's shutdown, which Python calls at exit.
    is_missed: like `in_job`, but the other ranks wait for it and cannot continue.
    checkpoint: the last complete checkpoint that it knows of (link/last_checkpoint.py).
    failed_at: the launcher's time.monotonic() when the error happened; infinity if unknown.
    """

    rank: int
    host: str = ""
    pid: int = 0
    status: int | None = None
    stopped_by: str | None = None
    report: dict[str, Any] | None = None
    traceback: str = ""
    stderr_tail: str = ""
    checkpoint: dict[str, Any] | None = None
    failed_at: float = float("inf")
    job_continues: bool = False
    in_job: bool = False
    is_missed: bool = False

    @property
    def done(self) -> bool:
        """Whether the program ended by itself with status 0, or the others continued without it.

        True of every rank of a successful job."""
        return self.job_continues or (self.status == 0 and self.stopped_by is None and not self.is_missed)

    @property
    def is_lost(self) -> bool:
        """Whether the rank was lost: by a signal, with its host, or without a report. Its own errors are not a loss."""
        return self.stopped_by is None and (self.status is None or self.status < 0 or self.has_vanished)

    @property
    def has_vanished(self) -> bool:
        """Whether the rank ended with status 0 in the middle of a job (os._exit) that can continue without it."""
        return self.status == 0 and self.in_job

    @property
    def gives_up(self) -> bool:
        """Whether the rank is a newcomer that cannot join the others."""
        return bool((self.report or {}).get("gives_up"))

    @property
    def error_text(self) -> str:
        """The traceback, or ""."""
        text = str((self.report or {}).get("traceback") or self.traceback)
        lines = [line for line in text.splitlines() if not _BOILERPLATE.match(line)]
        return "\n".join(lines).strip("\n")

    @property
    def error(self) -> str:
        """`full_error`, shortened."""
        return _shorten(self.full_error, _SUMMARY_CHARACTERS)

    @property
    def full_error(self) -> str:
        """The last line of the traceback ("ValueError: bad"), or "" without one."""
        if self.report is not None and self.report.get("summary"):
            return str(self.report["summary"])
        for line in reversed(self.error_text.splitlines()):
            if line[:1].strip() and _LAST_LINE.match(line):
                return line.strip()
        return str((self.report or {}).get("type", ""))

    @property
    def missed(self) -> list[int] | None:
        """The lost ranks that its error names; None: the error does not name any."""
        lost = (self.report or {}).get("lost")
        return None if lost is None else list(lost["ranks"])

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed only because another rank failed, or because it was asked to end."""
        if self.missed is not None:
            return True
        if "failed_rank" in (self.report or {}):
            return True
        return self.stopped_by is not None and (not self.error or self.error.partition(":")[0] == "KeyboardInterrupt")

    def has_failed_like(self, other: RankOutcome) -> bool:
        """Whether the rank failed on its own with the same error as `other`. Numbers, such as the rank, may differ."""
        if self is other or (self.report or {}).get("failed_alike"):
            return True
        if not self.error and not other.error:  # such as "No module named train", printed by Python itself
            by_itself = self.stopped_by is None and other.stopped_by is None
            return by_itself and self.status is not None and self.status >= 0 and self.status == other.status
        return are_alike(self.full_error, other.full_error) and not self.is_consequence

    def seconds_for_others(self, *, with_mpi: bool) -> float:
        """Returns how long the other ranks may take to fail on their own after this rank, the first to fail."""
        if self.status == RESTART_STATUS:
            return _CASCADE_OF_RESTART_SECONDS
        if self.is_consequence:
            return _CASCADE_BEFORE_CAUSE_SECONDS if with_mpi else _CASCADE_WITHOUT_MPI_SECONDS
        return _CASCADE_SECONDS

    def describe(self) -> str:
        """Returns a few words that describe how it ended."""
        if self.error:
            return self.error
        if self.status is None:
            return "sent no report of its end" if self.host else "not started"
        if self.stopped_by is not None:
            return f"stopped by {self.stopped_by}"
        if self.status == 0:
            return _MIDDLE
        if self.status == RESTART_STATUS:
            return f"ended with exit status {RESTART_STATUS}, which asks for a restart"
        if self.status < 0:
            return f"killed by {signal_name(-self.status)}"
        return f"ended with exit status {self.status}"

    @property
    def exit_status(self) -> int:
        """The status as a shell shows it; never 0 for a rank that is not done."""
        if self.status is None or self.stopped_by is not None or self.status == 0:
            return 1
        return self.status if self.status > 0 else 128 - self.status


def first_failure(outcomes: Sequence[RankOutcome]) -> RankOutcome | None:
    """Returns the rank whose failure explains the others'; None if all are done or were only asked to end.

    If the errors only report a lost rank, returns the lost rank, which may have died before it could report.
    """
    causes = [o for o in outcomes if not o.done and not (o.stopped_by is not None and not o.error)]
    first = min(causes, key=_order, default=None)
    seen: list[RankOutcome] = []
    while first is not None and first.missed and first not in seen:
        seen.append(first)
        first = min((o for o in outcomes if o.rank in first.missed), key=_order, default=first)
    # If ranks report one another as lost, take the first.
    first = seen[0] if first in seen[:-1] else first
    # Among ranks that failed with the same error, take the lowest, not the quickest.
    return first if first is None else min(_alike(outcomes, first), key=lambda each: each.rank)


def _alike(outcomes: Sequence[RankOutcome], first: RankOutcome) -> list[RankOutcome]:
    """Returns `first`, and the ranks that have failed with the same error."""
    return [each for each in outcomes if each is first or (not each.done and each.has_failed_like(first))]


def _order(outcome: RankOutcome) -> tuple[bool, float, int]:
    return outcome.is_consequence, outcome.failed_at, outcome.rank


def explain(outcomes: Sequence[RankOutcome], first: RankOutcome, mpirun_text: str = "", starter: str = "mpirun") -> str:
    """Returns the message about a failed job: which ranks failed, other ranks' own errors, and last the first error.

    Errors of ranks that were ended because of the first error are left out: such ranks can only guess the cause.
    """
    alike = _alike(outcomes, first)
    where = f" on host {first.host}" if first.host else ""
    if len(alike) > 1:
        is_all = len(alike) == sum(not each.job_continues for each in outcomes)
        who = f"all {len(alike)} ranks" if is_all else _ranks([each.rank for each in alike])
        what = "failed alike"
        rank_prefix = f" Rank {first.rank}{where}:"
    else:
        who, rank_prefix = f"rank {first.rank}{where}", ""
        # The lost rank may be unknown, or may itself report this rank as lost.
        what = "was the first to report a lost rank" if first.error and first.is_consequence else "failed first"
    details = []
    if first.error and first.status and first.stopped_by is None:
        details.append(status_text(first.status))
    if first.error_text and (first.report or {}).get("leaves_out"):
        details.append("KERAS_DDL_ALL_FRAMES=1 shows all frames")
    how = first.describe()
    if first.missed is None and not first.error and first.stopped_by is not None:
        how = "left while others waited for it (sys.exit, or the end of its program?)"
    said = "" if first.error_text else f": {how}"
    status = f" ({'; '.join(details)})" if details else ""
    lines = [f"keras-ddl: {who} {what}, and the job was ended{said}{status}{'.' if rank_prefix else ''}{rank_prefix}"]
    if first.error_text and not rank_prefix:
        lines[0] += ":"
    lines += _lines_of_others([each for each in outcomes if each not in alike], first)
    messages = mpirun_messages(mpirun_text)
    if not first.error and not first.stderr_tail.strip() and messages:
        lines += [f"keras-ddl: {starter} said:", *(f"    {line}" for line in messages.splitlines())]
    if first.error_text:
        lines.append(first.error_text)
    elif first.status == -signal.SIGKILL:
        # A killed rank could not report this, so the end of its stderr is about something else.
        lines.append(
            "SIGKILL comes from another process, or from the kernel when memory runs out (see dmesg, and the memory "
            "limit of the container)."
        )
    elif first.stderr_tail.strip() and not first.done:
        tail = [line for line in first.stderr_tail.strip().splitlines() if not _BOILERPLATE.match(line)]
        lines.append("The last lines of its stderr:")
        lines += tail[-_TAIL_LINES:]
    return "\n".join(lines) + "\n" + vanished(outcomes) + resume_hint(outcomes)


def vanished(outcomes: Sequence[RankOutcome]) -> str:
    """Returns the line about ranks that ended with status 0 and that the others continued without; "" for none."""
    ranks = [each.rank for each in outcomes if each.job_continues and each.has_vanished]
    if not ranks:
        return ""
    return f"keras-ddl: the other ranks have continued without {_ranks(ranks)}: {_MIDDLE}.\n"


def _lines_of_others(others: Sequence[RankOutcome], first: RankOutcome) -> list[str]:
    """Returns lines about failures that `first` does not explain, and why ranks do not continue without a lost rank."""
    by_text: dict[str, list[int]] = {}
    for outcome in others:
        if outcome.done:
            continue
        if (outcome.report or {}).get("ends_others"):  # although the job could have continued
            text = _shorten(outcome.full_error, _LAST_CHARACTERS)
        elif outcome.is_consequence or (outcome.stopped_by is not None and not outcome.error):
            continue
        else:
            text = outcome.describe()
        by_text.setdefault(text, []).append(outcome.rank)
    return [f"keras-ddl: {_ranks(ranks)}: {text}" for text, ranks in by_text.items()]


def resume_hint(outcomes: Sequence[RankOutcome]) -> str:
    """Returns the line that names the last checkpoint, and how to resume from it; "" without one."""
    known = [outcome.checkpoint for outcome in outcomes if outcome.checkpoint is not None]
    if not known:
        return ""
    last = max(known, key=lambda each: each["step"])
    restarts = "--restarts N does this" if last["resume"] else "With it, --restarts N starts the job again"
    return f"keras-ddl: {last_checkpoint.resume_hint(last)} {restarts} automatically, up to N times.\n"


def mpirun_messages(text: str) -> str:
    """Returns mpirun's output without the blocks that only say that a rank failed."""
    blocks = [block.strip("\n") for block in _RULER.split(text)]
    return "\n".join(block for block in blocks if block.strip() and not _ROUTINE.search(block))


def signal_name(number: int) -> str:
    """Returns "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def status_text(status: int) -> str:
    """Returns "exit status 3" or "killed by SIGKILL"."""
    return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"


def _ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 1", "ranks 0, 2-5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _shorten(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 3] + "..."
