"""The mutants of the rules of the cut: every single change to be made of the files of keras_ddl/cut/ (see mutants.py).

A mutant is one small change: an axis off by one, a sum for a maximum, the second operand for the first, a condition
dropped, a comparison turned round.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "keras_ddl.cut"
FOLDER = ROOT / "keras_ddl" / "cut"
EXPLAINED = ROOT / "tests" / "cut" / "equivalent_mutants.txt"
# What decides the numbers. Reports, plans of cost and graph-building mechanics decide none.
FILES = (
    "specs/*",
    "rules/*",
    "batch_statistics/*",
    "operations/propagation",
    "operations/factors",
    "shards/sharding",
    "values/redistribute",
    "analysis/extents",
    "analysis/dims",
)


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
_REGISTER = ("spec", "rule", "extents", "numbers", "contents")  # types of operations, in any order
_GENERIC = ("Callable", "Counter", "dict", "list", "set", "tuple", "Sequence")
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
        and not all(
            isinstance(a, ast.Constant) and isinstance(a.value, str) for a in node.args[:2]
        )  # types in any order
        and not any(isinstance(a, ast.Starred) for a in node.args[:2])
    ):

        def swapped(each: ast.Call) -> ast.AST:
            each.args[0], each.args[1] = each.args[1], each.args[0]
            return each

        yield "first two arguments exchanged", swapped
    is_pair = isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) == 2 and isinstance(node.ctx, ast.Load)
    if is_pair and not hasattr(node, "is_set"):

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
    if set(text) & set("aeiou"):  # a word
        return False
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
        if not function and isinstance(node, ast.Subscript) and ast.unparse(node.value) in _GENERIC:  # a type
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
            for each in node.decorator_list:
                yield from of(each, function, node)
            for each in node.body:
                yield from of(each, function, each)
            return
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            node.comparators[0].is_set = True  # `x in (a, b)`, in any order
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
    file = path.relative_to(FOLDER).as_posix()
    tree = ast.parse(source_of(file))
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
    paths = sorted({path for each in FILES for path in FOLDER.glob(f"{each}.py")})
    return [mutant for path in paths for mutant in mutants_of(path)]


def source_of(file: str) -> str:
    """Returns the source of a file of keras_ddl/cut/."""
    return (FOLDER / file).read_text(encoding="utf-8")


def tree_of(mutant: Mutant) -> ast.Module:
    """Returns the syntax tree of a mutant's module."""
    tree = ast.parse(source_of(mutant.file))
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


def explained() -> set[str]:
    """Returns the names of the mutants that change nothing that is computed."""
    lines = EXPLAINED.read_text(encoding="utf-8").splitlines() if EXPLAINED.exists() else []
    return {line for line in lines if line and not line.startswith("#")}
