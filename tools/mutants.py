"""Changes the rules of the cut one at a time and sees which changes its tests notice.

    make mutants                          # a sample of 60, with the seed of the day
    make mutants ARGS="--all"             # every one: hours
    make mutants ARGS="--only specs/contractions --list"

A mutant is one small change in one file of keras_ddl/cut/: an axis off by one, a sum for a maximum, the second operand
for the first, a condition dropped, a comparison turned round. It is made in memory: no file changes. First the tests
run once as they are and it is recorded which of them reach which line; then each mutant meets the tests that reach its
line, the quickest first, until one fails. A mutant that no test notices either does not change what is computed (only
what it costs, say) and stands in tests/cut/equivalent_mutants.txt with the reason, or a test is missing.

Exits with 1 if a mutant survives that is not explained.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import importlib.abc
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "keras_ddl.cut"
TESTS = ROOT / "tests" / "cut"
EXPLAINED = TESTS / "equivalent_mutants.txt"
# What decides the numbers. Reports, plans of cost and graph-building mechanics decide none.
FILES = (
    "specs/*",
    "rules/*",
    "propagation",
    "factors",
    "own_statistics",
    "sharding",
    "redistribute",
    "extents",
    "dims",
)
_SECONDS = 90.0  # of tests for one mutant, as they took without it

# ---- mutants ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change that can be made in a file."""

    file: str  # below keras_ddl/cut/
    line: int
    place: tuple[int, int]  # in the order of `_places`, and of `_changes`
    name: str  # file, function and change: the same while the code around it changes
    lines: tuple[int, int]  # of the statement that tests must reach

    @property
    def module(self) -> str:
        return f"{PACKAGE}.{self.file.removesuffix('.py').replace('/', '.')}"


_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_COMBINED = {"sum": "max", "max": "min", "min": "sum", "product": "sum", "mean": "sum"}


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    """Yields (what is changed, the function that changes a copy of `node`)."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:

        def turned(each: ast.Compare) -> ast.AST:
            each.ops[0] = _COMPARED[type(each.ops[0])]()
            return each

        yield "comparison turned", turned
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:

        def computed(each: ast.BinOp) -> ast.AST:
            each.op = _COMPUTED[type(each.op)]()
            return each

        yield "another operator", computed
    if isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):

            def dropped(each: ast.BoolOp, place: int = place) -> ast.AST:
                del each.values[place]
                return each.values[0] if len(each.values) == 1 else each

            yield f"condition {place} dropped", dropped
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", lambda each: each.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} inverted", lambda each: ast.Constant(not each.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield f"{node.value} + 1", lambda each: ast.Constant(each.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _COMBINED:
        yield f"{_COMBINED[node.value]} for {node.value}", lambda each: ast.Constant(_COMBINED[each.value])
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_factors(node.value):
        yield f"labels of {node.value!r} reversed", lambda each: ast.Constant(each.value[::-1])
        yield f"first label of {node.value!r} another", lambda each: ast.Constant("Q" + each.value[1:])
    if (
        isinstance(node, ast.Call)
        and len(node.args) >= 2
        and not any(isinstance(a, ast.Starred) for a in node.args[:2])
    ):

        def swapped(each: ast.Call) -> ast.AST:
            each.args[0], each.args[1] = each.args[1], each.args[0]
            return each

        yield "first two arguments exchanged", swapped
    if isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load):

        def exchanged(each: ast.List) -> ast.AST:
            each.elts.reverse()
            return each

        yield "two elements exchanged", exchanged
    if isinstance(node, (ast.If, ast.IfExp)):

        def never(each: ast.If) -> ast.AST:
            each.test = ast.Constant(False)
            return each

        def always(each: ast.If) -> ast.AST:
            each.test = ast.Constant(True)
            return each

        yield "condition never holds", never
        yield "condition always holds", always


def _is_factors(text: str) -> bool:
    return 2 <= len(text) <= 5 and text.isalpha() and text.islower() and len(set(text)) == len(text)


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.AST]]:
    """Yields (function, outermost statement inside it, node) for all that may be changed: no types, messages, texts."""

    def of(node: ast.AST, function: str, statement: ast.stmt) -> Iterator[tuple[str, ast.stmt, ast.AST]]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arg)):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
            for each in node.decorator_list:
                yield from of(each, function, node)
            for each in node.body:
                yield from of(each, function, each)
            return
        yield function, statement, node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    inner = each if isinstance(each, ast.stmt) and function else statement
                    yield from of(each, function, inner)

    for each in tree.body:
        yield from of(each, "", each)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields every mutant of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    file = path.relative_to(ROOT / "keras_ddl" / "cut").as_posix()
    names = set[str]()
    for index, (function, statement, node) in enumerate(_places(tree)):
        for kind, (what, change) in enumerate(_changes(node)):
            if ast.dump(change(copy.deepcopy(node))) == ast.dump(node):
                continue
            name = f"{file}:{function}: {what} in `{ast.unparse(node).splitlines()[0][:80]}`"
            while name in names:
                name += " (again)"
            names.add(name)
            last = statement.end_lineno or statement.lineno
            if isinstance(statement, ast.If):  # its own line is enough
                last = statement.test.end_lineno or statement.lineno
            yield Mutant(file, getattr(node, "lineno", statement.lineno), (index, kind), name, (statement.lineno, last))


def all_mutants() -> list[Mutant]:
    """Returns every mutant of FILES."""
    paths = sorted({path for each in FILES for path in (ROOT / "keras_ddl" / "cut").glob(f"{each}.py")})
    return [mutant for path in paths for mutant in mutants_of(path)]


def tree_of(mutant: Mutant) -> ast.Module:
    """Returns the syntax tree of a mutant's module."""
    tree = ast.parse((ROOT / "keras_ddl" / "cut" / mutant.file).read_text(encoding="utf-8"))
    index, kind = mutant.place
    *_, (_, _, node) = itertools.islice(_places(tree), index + 1)
    _, change = list(_changes(node))[kind]
    return ast.fix_missing_locations(_replace(tree, node, change(node)))


def _replace(tree: ast.Module, old: ast.AST, new: ast.AST) -> ast.Module:
    if new is old:
        return tree

    class Replacing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else self.generic_visit(node)

    return Replacing().visit(tree)


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a syntax tree."""

    def __init__(self, name: str, tree: ast.Module, path: str) -> None:
        self._name, self._code, self._path = name, compile(tree, path, "exec"), path

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        return importlib.util.spec_from_loader(name, self, origin=self._path) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._path
        exec(self._code, module.__dict__)


# ---- tests -----------------------------------------------------------------------------------------------------------


class _Record:
    """A plug-in of pytest: which lines each test reaches, and how long it takes."""

    def __init__(self, measured: Any) -> None:
        self._measured, self.seconds, self.failed = measured, dict[str, float](), set[str]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)


def _run_tests(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    import pytest

    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no", *arguments], list(plugins)))


def _record(tests: Sequence[str], data: Path, seconds: Path) -> None:
    import coverage

    measured = coverage.Coverage(data_file=str(data), source_pkgs=[PACKAGE], config_file=False)
    measured.start()
    record = _Record(measured)
    _run_tests(tests, [record])
    measured.stop()
    measured.save()
    for each in sorted(record.failed):  # such as what measures seconds, which recording takes
        print(f"left out, it fails while lines are recorded: {each}", flush=True)
        del record.seconds[each]
    seconds.write_text(json.dumps(record.seconds))
    os._exit(0 if record.seconds else 1)


def _meet(mutant: Mutant, tests: Sequence[str]) -> None:
    """In a process of its own: exits with pytest's status, or 9 where the module cannot even be imported."""
    path = importlib.util.find_spec(mutant.module)
    assert path is not None and path.origin is not None
    for name in [each for each in sys.modules if each.startswith(PACKAGE)]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Importer(mutant.module, tree_of(mutant), path.origin))
    os._exit(_run_tests(["-x", *tests]))


def _in_child(target: Callable[..., None], arguments: tuple[Any, ...], limit: float | None) -> int | None:
    """Returns the child's status; None if it had to be ended."""
    child = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    child.start()
    child.join(limit)
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        return None
    return child.exitcode


class Reach:
    """Which tests reach which lines, and how long they take."""

    def __init__(self, data: Path, seconds: Path) -> None:
        import coverage

        self.seconds: dict[str, float] = json.loads(seconds.read_text())
        self._lines: dict[str, dict[int, list[str]]] = {}
        found = coverage.CoverageData(str(data))
        found.read()
        for path in found.measured_files():
            file = path.partition("/keras_ddl/cut/")[2]
            self._lines[file] = found.contexts_by_lineno(path)

    def tests(self, mutant: Mutant) -> list[str]:
        """Returns tests that reach a mutant's line: those that name what it is about, then the quickest."""
        lines = self._lines.get(mutant.file, {})
        first, last = mutant.lines
        reached = {test for line in range(first, last + 1) for test in lines.get(line, []) if test}
        if not reached:  # what runs when the module is imported: all tests that reach anything of it
            reached = {test for each in lines.values() for test in each if test}
        words = [word for word in mutant.name.replace("'", '"').split('"')[1::2] if word.isalpha()]
        reached &= self.seconds.keys()
        order = sorted(reached, key=lambda test: (not any(word in test for word in words), self.seconds.get(test, 0.0)))
        chosen, total = [], 0.0
        for test in order:
            total += self.seconds.get(test, 0.0)
            if chosen and total > _SECONDS:
                break
            chosen.append(test)
        return chosen

    def limit(self, tests: Sequence[str]) -> float:
        """Seconds after which a mutant is one that never ends."""
        return 60 + 10 * sum(self.seconds.get(each, 0.0) for each in tests)


# ---- the program -----------------------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sample", type=int, default=60, metavar="N", help="how many mutants (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="every mutant; some hours")
    parser.add_argument("--seed", type=int, default=None, help="of the sample (default: the day's)")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="list the mutants, run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: %(default)s)")
    parser.add_argument("--tests", nargs="*", default=["tests/cut"], help="the tests that must notice them")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "mutants", help="where what tests reach is kept"
    )
    parser.add_argument("--record", action="store_true", help="record again what tests reach")
    return parser.parse_args()


def explained() -> set[str]:
    """Returns the names of the mutants that change nothing that is computed."""
    lines = EXPLAINED.read_text(encoding="utf-8").splitlines() if EXPLAINED.exists() else []
    return {line for line in lines if line and not line.startswith("#")}


def main() -> int:
    """Runs the program; returns its exit status."""
    asked = _arguments()
    mutants = [each for each in all_mutants() if asked.only in each.name]
    total = len(mutants)
    if not asked.all and len(mutants) > asked.sample:
        seed = asked.seed if asked.seed is not None else int(time.time() // 86400)
        mutants = random.Random(seed).sample(mutants, asked.sample)
        print(f"{asked.sample} of {total} mutants, --seed {seed}")
    if asked.list:
        print(*(each.name for each in mutants), sep="\n")
        return 0
    import tensorflow  # noqa: F401, once for all children; nothing runs in it here

    asked.folder.mkdir(parents=True, exist_ok=True)
    data, seconds = asked.folder / "lines", asked.folder / "seconds.json"
    if asked.record or not seconds.exists():
        data.unlink(missing_ok=True)
        print("recording which lines the tests reach", flush=True)
        if _in_child(_record, (asked.tests, data, seconds), None) != 0:
            seconds.unlink(missing_ok=True)
            print("no test passes without any mutant", file=sys.stderr)
            return 2
    reach = Reach(data, seconds)
    known = explained()
    killed, never_reached, survivors = 0, [], []

    def run(mutant: Mutant) -> tuple[Mutant, bool | None]:
        tests = reach.tests(mutant)
        if not tests:
            return mutant, None
        return mutant, _in_child(_meet, (mutant, tests), reach.limit(tests)) != 0

    with ThreadPoolExecutor(asked.jobs) as pool:
        for number, (mutant, is_killed) in enumerate(pool.map(run, mutants), 1):
            killed += bool(is_killed)
            if is_killed is None:
                never_reached.append(mutant)
            elif not is_killed:
                survivors.append(mutant)
            word = {True: "killed", False: "SURVIVED", None: "NOT REACHED"}[is_killed]
            print(f"{number:4}/{len(mutants)} {word:11} line {mutant.line}: {mutant.name}", flush=True)
    open_ones = [each for each in (*survivors, *never_reached) if each.name not in known]
    print(f"{killed} of {len(mutants)} killed; {len(survivors) + len(never_reached) - len(open_ones)} explained")
    for each in open_ones:
        print(f"not noticed: {each.name}")
    return 1 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())
