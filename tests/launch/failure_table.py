"""Tries faults in a training of three ranks, and writes a table of how the job ends.

    python tests/launch/failure_table.py [CASE...]

runs the cases (all of them: some ten minutes) under keras-ddl run and under mpirun, checks each, and writes its row.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from keras_ddl import checkpoint as ckpt
from launch.launching import Started

HERE = Path(__file__).parent
PAGE = HERE / "failures.md"
BEGIN, END = "<!-- failures: written by tests/launch/failure_table.py -->\n", "<!-- end of failures -->\n"
HEADER = (
    "| what happens to one of three ranks | `keras-ddl run`: seconds, status | what it says last | "
    "plain `mpirun`: seconds, status |\n|---|---|---|---|\n"
)
LAST_LINES = 12
RUN, MPIRUN = "keras-ddl run", "mpirun"
_EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
_OF_TENSORFLOW = ("__autograph_generated_file", "__pycache__")  # left by ranks that could not clean up
_OF_OPEN_MPI = ("ompi", "prte", "pmix", "openmpi")
_NAMESPACE = ["unshare", "--mount", "sh", "-c"]


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong.

    Attributes:
        what: the first cell of its row.
        words: a pattern for the last lines under `keras-ddl run`; the row shows the line where its match ends.
        status: the exit status under `keras-ddl run`.
        mpirun_words: a pattern for the output under mpirun; None: the case is not for mpirun.
        seconds: limit until the job has ended, on a busy machine.
        env: further variables.
        around: words before the command. ranks: the value of -np. options: options of `keras-ddl run`.
        has_checkpoint: whether the fault comes after the first checkpoint, which the output then names.
    """

    what: str
    words: str
    status: int
    mpirun_words: str | None
    seconds: float = 30.0
    env: Mapping[str, str] = field(default_factory=dict)
    around: tuple[str, ...] = ()
    ranks: str = "3"
    options: tuple[str, ...] = ()
    has_checkpoint: bool = True


_LOST = r"RankLostError"
_MIN_NP = "2:3"
_CALLBACK = r"rank 1 .* failed first(?s:.*)\nRuntimeError: my callback is wrong"
CASES = {
    "sigkill": Case("SIGKILL (a kernel without memory does this)", r"rank 1 .*: killed by SIGKILL", 137, "signal 9"),
    "sigkill_rank_0": Case("SIGKILL of rank 0", r"rank 0 .*: killed by SIGKILL", 137, "signal 9"),
    "sigkill_continues": Case(
        "SIGKILL, with `-np 2:3`: the others continue",
        r"rank 1 was lost \(killed by SIGKILL\); 2 ranks continue",
        0,
        None,
        ranks=_MIN_NP,
    ),
    "sigkill_too_few": Case(
        "SIGKILL of ranks 1 and 2, with `-np 2:3`: too few remain",
        r"rank [12] .*: killed by SIGKILL",
        137,
        None,
        ranks=_MIN_NP,
    ),
    "sigkill_rank_0_continues": Case(
        "SIGKILL of rank 0, with `-np 2:3`: the next rank writes",
        r"rank 0 was lost \(killed by SIGKILL\); 2 ranks continue",
        0,
        None,
        ranks=_MIN_NP,
    ),
    "sigstop_continues": Case(
        "SIGSTOP, with `-np 2:3` and `KERAS_DDL_DEADLINE_SECONDS=8`: it is killed, and the others continue",
        r"rank 1 has not answered the other ranks for 8 s and is killed",
        0,
        None,
        90.0,
        {"KERAS_DDL_DEADLINE_SECONDS": "8"},
        ranks=_MIN_NP,
    ),
    "callback_min_np": Case(
        "an exception in a callback, with `-np 2:3`: it would be raised again",
        _CALLBACK,
        1,
        None,
        ranks=_MIN_NP,
    ),
    "sigstop": Case(
        "SIGSTOP, with `KERAS_DDL_DEADLINE_SECONDS=8`",
        r"DeadlineError: .*",
        1,
        "DeadlineError",
        60.0,
        {"KERAS_DDL_DEADLINE_SECONDS": "8", "KERAS_DDL_WARN_AFTER_SECONDS": "3"},
    ),
    "exit_0": Case(
        "`sys.exit(0)`", r"rank 1 .* failed first.*: (ended with status 0 in the middle|left while others)", 1, _LOST
    ),
    "exit_3": Case("`sys.exit(3)`", r"rank 1 .*: ended with exit status 3", 3, "exit status|exited|Exit code"),
    "os_exit_0": Case("`os._exit(0)`", r"rank 1 .*: ended with status 0 in the middle of the job", 1, _LOST),
    "generator": Case(
        "an exception in a data generator",
        r"rank 1 .* failed first(?s:.*)\nKeyError: 'my generator is wrong'",
        1,
        "KeyError",
    ),
    "callback": Case("an exception in a callback", _CALLBACK, 1, "my callback"),
    "train_step": Case(
        "an exception in `train_step`",
        r"rank 1 .* failed first(?s:.*)\nRuntimeError: my train_step is wrong",
        1,
        "my train",
    ),
    "full_disk": Case("the checkpoint disk is full", r"CheckpointError: .*no space left", 1, "no space left"),
    "read_only_disk": Case("that disk becomes read-only", r"CheckpointError: .*Read-only", 1, "Read-only"),
    "small_shm": Case(
        "`/dev/shm` has 64 KB: slower, no other effect",
        r"warning: /dev/shm on host .*: 64 KiB free",
        0,
        "not enough space for /dev/shm",
        60.0,
        around=(*_NAMESPACE, 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"),
        has_checkpoint=False,
    ),
    "full_shm": Case(
        "`/dev/shm` becomes full: no effect",
        "",
        0,
        r"\A",
        60.0,
        around=(*_NAMESPACE, 'mount -t tmpfs -o size=200m none /dev/shm && exec "$@"', "sh"),
    ),
    "cgroup_memory": Case(
        "a control group's memory is used up", r"rank 1 .*: killed by SIGKILL", 137, "signal 9", 90.0
    ),
    "ulimit_memory": Case("the limit of `ulimit -v` is reached", r"rank 1 .*MemoryError", 1, "MemoryError"),
    "few_files": Case(
        "the limit of `ulimit -n` is reached",
        r"Too many open files",
        1,
        "Too many open files",
        60.0,
        has_checkpoint=False,
    ),
    "fork": Case("a forked child calls a collective", r"rank 1 .*NotInitializedError", 1, "NotInitializedError"),
    "spawn": Case("a spawned child calls a collective", r"rank 1 .*NotInitializedError", 143, "NotInitializedError"),
    "pid_namespaces": Case(
        "SIGKILL, each rank in a PID namespace (`OMPI_MCA_btl=self,tcp`: Open MPI's own shared memory crashes there)",
        r"rank 1 .*(SIGKILL|status 137)",
        137,
        None,
        env={"OMPI_MCA_btl": "self,tcp"},
    ),
    "launcher_killed": Case("`keras-ddl run` gets SIGKILL", r"", -9, None),
    "mpirun_killed": Case(
        "mpirun gets SIGKILL, with `--mpirun mpirun`",
        r"mpirun ended \(killed by SIGKILL\)",
        137,
        None,
        options=("--mpirun", "mpirun"),
    ),
}


@dataclass(frozen=True)
class Seen:
    """How a case ended: seconds since the fault (None: no fault, or a harmless one), the status, the last lines."""

    seconds: float | None
    status: int
    last: list[str]


class _NotOpenMpis(set):
    """Files in /dev/shm, without those of Open MPI."""

    def __or__(self, other: set[str]) -> _NotOpenMpis:
        return _NotOpenMpis([*self, *(path for path in other if "sm_segment" not in path)])

    __ior__ = __or__


@contextlib.contextmanager
def _disk(case: str, folder: Path) -> Iterator[None]:
    """Mounts a separate disk for the checkpoints of a case that needs one."""
    if case not in ("full_disk", "read_only_disk"):
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def _cgroup(case: str) -> Iterator[dict[str, str]]:
    """Creates a control group with 600 MB for rank 1, of version 1 or 2."""
    if case != "cgroup_memory":
        yield {}
        return
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"keras_ddl_test_{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(1200 << 20))
                try:
                    yield {"TEST_CGROUP": str(group)}
                finally:
                    group.rmdir()
                return
            group.rmdir()
    raise NotImplementedError("no control group of memory can be made here")


def can_try(case: str) -> bool:
    """Returns whether this machine allows the case: root, and control groups of memory."""
    if case == "cgroup_memory":
        try:
            with _cgroup(case):
                return True
        except NotImplementedError:
            return False
    needs_root = case in ("full_disk", "read_only_disk", "full_shm", "pid_namespaces")
    return not needs_root or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def see(case: str, launcher: str, folder: Path) -> Seen:
    """Runs one case and checks how it ends."""
    told = CASES[case]
    (folder / "ckpt").mkdir()
    python = [sys.executable, str(HERE / "failing_training.py"), str(folder), case]
    if case == "pid_namespaces":
        # With a shell between, because the first process of a namespace would survive its own SIGKILL.
        shell = ["sh", "-c", '"$@"; exit $?', "sh"]
        python = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *shell, *python]
    run = [sys.executable, "-m", "keras_ddl.cli", "run", "-np", told.ranks, *told.options, "--", *python]
    if launcher == MPIRUN:
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        run = [mpirun, *["-np", "3", "--bind-to", "none", "--oversubscribe"], *python]
    command = [*told.around, *run]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with _disk(case, folder / "ckpt"), _cgroup(case) as group:
        started = Started(command, folder, env={**root, **told.env, **group}, main=("-c", _EXECUTE))
        if launcher == MPIRUN:  # leaves its own files when a job is aborted
            started.may_leave, started.segments = _OF_TENSORFLOW + _OF_OPEN_MPI, _NotOpenMpis()
        ended = started.finish()
        if told.has_checkpoint:
            found = ckpt.list_checkpoints(folder / "ckpt")
            assert found and all(each.problem is None for each in found), (found, ended)
            ckpt.validate(found[-1])
    fault = folder / "fault"
    # A fault that exists from the start has no time.
    seconds = time.time() - float(fault.read_text()) if fault.exists() and told.status else None
    text = ended.err + ended.out
    assert seconds is None or seconds < told.seconds, f"{seconds} s\n{ended}"
    last = ended.err.splitlines()[-LAST_LINES:]
    if launcher == RUN:
        assert ended.status == told.status, ended
        assert re.search(told.words, "\n".join(last)), f"no {told.words!r} in the last lines\n{ended}"
        if told.has_checkpoint and told.words and told.status:
            assert f"The last checkpoint is {found[-1].path}. To continue" in last[-1], ended
    else:
        assert (ended.status != 0) == (told.status != 0), ended
        assert re.search(told.mpirun_words, text), f"nobody says {told.mpirun_words!r}\n{ended}"
        if told.has_checkpoint and _LOST in text:
            assert "The last checkpoint is " in text, ended
    return Seen(seconds, ended.status, last)


def _cell(seen: Seen) -> str:
    seconds = "-" if seen.seconds is None else f"{seen.seconds:.0f} s"
    return f"{seconds}, {seen.status if seen.status >= 0 else 128 - seen.status}"


def row(case: str, ours: Seen, theirs: Seen | None) -> str:
    """Returns a case's row of the table."""
    told = CASES[case]
    text = "\n".join(ours.last)
    found = list(re.finditer(told.words, text)) if told.words else []
    line = text[: found[-1].end()].rpartition("\n")[2] + text[found[-1].end() :].partition("\n")[0] if found else ""
    said = (
        re.sub(rf"{tempfile.gettempdir()}/failure-\w+/|/\S*/site-packages/", "", line)
        .replace(socket.gethostname(), "h0")
        .replace("|", "\\|")
        .strip()
    )
    said = said if len(said) < 170 else said[:167] + "..."
    mine, other = _cell(ours), "" if theirs is None else _cell(theirs)
    return f"| {told.what} | {mine} | {f'`{said}`' if said else ''} | {other} |\n"


def rows_of_page() -> dict[str, str]:
    """Returns the table of the page: fault -> its row."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = table.removeprefix(HEADER).splitlines(keepends=True)
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows}


def main(chosen: list[str]) -> None:
    for case in chosen or CASES:
        seen = []
        for launcher in [RUN, *([MPIRUN] if CASES[case].mpirun_words else [])]:
            folder = Path(tempfile.mkdtemp(prefix="failure-"))
            try:
                seen.append(see(case, launcher, folder))
            except AssertionError as error:
                print(f"FAILED {case} under {launcher}: {error}", flush=True)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        if len(seen) == 1 + (CASES[case].mpirun_words is not None):
            rows = rows_of_page()
            rows[CASES[case].what] = row(case, seen[0], seen[1] if len(seen) > 1 else None)
            print(rows[CASES[case].what], end="", flush=True)
            before, _, rest = PAGE.read_text().partition(BEGIN)
            after = rest.partition(END)[2]
            lines = [rows[told.what] for told in CASES.values() if told.what in rows]
            PAGE.write_text(before + BEGIN + HEADER + "".join(lines) + END + after)


if __name__ == "__main__":
    main(sys.argv[1:])
