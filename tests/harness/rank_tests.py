"""Runs test programs on real ranks from pytest, without using keras_ddl.launch.

A launch costs seconds, so put many checks into one. A *check program* is a file beside the tests with functions named
`check_*`, which every rank calls in the order of the file:

    # ops_checks.py
    import keras_ddl
    from harness.rank_program import skip

    keras_ddl.init()                       # module level: runs once per launch

    def check_sum_equals_numpy(): ...      # raise (assert) to fail, skip("why") to skip

    # test_ops.py
    from pathlib import Path
    from harness.rank_tests import rank_tests

    test_ops = rank_tests(Path(__file__).with_name("ops_checks.py"), [1, 2, (4, "x:2x2")])

gives one pytest item per check and launch (`test_ops[check_sum_equals_numpy-np2]`), while each launch is started once
and runs only the checks that were selected (-k; those with `@long` in `make test-all` only). A check passes
when it passes on every rank. Ranks wait for each other after every check (over files). After a failed check the ranks
end and new ones run the remaining checks.

For programs that should fail, `run_ranks` starts a script or a function once and returns what each rank wrote.
Both kill everything they started at the timeout and assert that no process and no shared memory remains.
np=1 is started without mpirun.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.launching import Outcome, find_mpirun, launch, run_ranks, without_mpi

__all__ = ["find_mpirun", "rank_tests", "run_ranks", "without_mpi"]


def rank_tests(
    program: Path | Sequence[Path],
    launches: Sequence[int | tuple[int, str]],
    *,
    check_timeout: float = 240,
    env: Mapping[str, str | None] | Callable[[], Mapping[str, str | None]] | None = None,
    mpi: bool = True,
) -> Callable[..., None]:
    """Returns a pytest function that runs the checks of `program` for every launch: np, or (np, mode).

    `program`: a check program, or several files that share the launches, because each launch takes seconds.
    `env`: variables to set, or to unset if None; or a function that returns them, if that takes time.
    `mpi`: whether mpirun starts the ranks; otherwise they meet like those of `keras-ddl run` on one host.
    `check_timeout`: limit in seconds for one check; a rank that takes longer is stopped and its stacks are shown. The
    slowest check takes 20 s on free cores.
    """
    programs = [program] if isinstance(program, Path) else list(program)
    pairs = [(item, None) if isinstance(item, int) else item for item in launches]
    ids = [f"np{np}" + (f"-{mode}" if mode else "") for np, mode in pairs]
    results: dict[tuple[int, str | None], dict[str, tuple[str, str]]] = {}
    seconds: dict[tuple[int, str | None], dict[str, float]] = {}

    @pytest.mark.parallel
    @pytest.mark.parametrize("launch", pairs, ids=ids)
    @pytest.mark.parametrize("check", _check_parameters(programs))
    def test_on_ranks(request: pytest.FixtureRequest, check: str, launch: tuple[int, str | None]) -> None:
        if launch not in results:
            seconds[launch] = {}
            chosen = _selected(request, launch)
            variables = env() if callable(env) else env
            results[launch] = _run_checks(programs, chosen, *launch, check_timeout, variables, seconds[launch], mpi)
        outcome, text = results[launch][check]
        request.node.user_properties.append(("seconds", seconds[launch].get(check, 0.0)))
        if outcome == "skipped":
            pytest.skip(text)
        assert outcome == "passed", text

    return test_on_ranks


def _selected(request: pytest.FixtureRequest, launch: tuple[int, str | None]) -> list[str]:
    chosen = []
    for item in request.session.items:
        if getattr(item, "originalname", "") == request.node.originalname and item.path == request.node.path:
            parameters = item.callspec.params
            if parameters["launch"] == launch:
                chosen.append(parameters["check"])
    return chosen


def _check_names(programs: Sequence[Path]) -> list[str]:
    return [check.name for check in _checks(programs)]


def _check_parameters(programs: Sequence[Path]) -> list[Any]:
    marks = [[pytest.mark.long] if _is_long(check) else [] for check in _checks(programs)]
    return [pytest.param(name, marks=each) for name, each in zip(_check_names(programs), marks)]


def _is_long(check: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "long" for each in check.decorator_list)


def _checks(programs: Sequence[Path]) -> list[ast.FunctionDef]:
    checks = [check for program in programs for check in _checks_of(program)]
    names = [check.name for check in checks]
    assert len(set(names)) == len(names), f"checks that run together need different names: {sorted(names)}"
    return checks


@functools.cache  # a program may have several launches
def _checks_of(program: Path) -> list[ast.FunctionDef]:
    body = ast.parse(program.read_text()).body
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def _run_checks(programs, names, np, mode, check_timeout, env, seconds, mpi) -> dict[str, tuple[str, str]]:
    """Returns the checks' outcomes; puts the time of each on its slowest rank into `seconds`."""
    results: dict[str, tuple[str, str]] = {}
    order = [name for name in _check_names(programs) if name in names]
    fresh_starts = 0
    while pending := [name for name in order if name not in results]:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            files = os.pathsep.join(map(str, programs))
            command = [f"checks:{check_timeout}", folder, files, *pending]
            timeout = 60 + check_timeout + 20 * len(pending)  # only a hang takes longer
            outcome = launch(command, Path(folder), np, mode, timeout, env, None if mpi else without_mpi(np))
            for name in pending:
                results.update(_read_outcome(Path(folder), name, np, outcome, seconds))
            ended_well = outcome.returncode == 0
        if not any(name in results for name in pending):
            results[pending[0]] = ("failed", f"{pending[0]} did not end on any rank\n{outcome.text()}")
        elif ended_well is False and all(results.get(name, ("",))[0] != "failed" for name in pending):
            last = [name for name in pending if name in results][-1]
            results[last] = ("failed", f"the ranks did not end well after {last}\n{outcome.text()}")
        fresh_starts += 1
        if fresh_starts == 5:
            for name in order:
                results.setdefault(name, ("failed", "not run: five earlier checks of this program failed"))
    return results


def _read_outcome(
    folder: Path, name: str, np: int, outcome: Outcome, seconds: dict[str, float]
) -> dict[str, tuple[str, str]]:
    """Returns one check's outcome over all ranks, or {} if no rank got that far."""
    found: dict[int, tuple[str, str]] = {}
    for rank in range(np):
        path = folder / f"{name}.{rank}.json"
        if path.exists():
            *kind_and_text, took = json.loads(path.read_text())
            found[rank] = tuple(kind_and_text)
            seconds[name] = max(took, seconds.get(name, 0.0))
    if not found:
        return {}
    bad = [f"rank {rank}: {text}" for rank, (kind, text) in found.items() if kind == "failed"]
    missing = [rank for rank in range(np) if rank not in found]
    if missing:
        bad.append(f"{name} did not end on rank(s) {missing}")
    if bad:
        return {name: ("failed", "\n".join(bad) + "\n" + outcome.text())}
    kinds = {kind for kind, _ in found.values()}
    if kinds == {"skipped"}:
        return {name: ("skipped", found[0][1])}
    if "skipped" in kinds:
        return {name: ("failed", f"some ranks skipped {name} and others did not: {found}")}
    return {name: ("passed", "")}
