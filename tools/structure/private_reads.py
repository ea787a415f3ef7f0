"""Checks by syntax trees that only keras_ddl/compat/ reads private attributes of TensorFlow and Keras.

A syntax tree does not show an object's class. An attribute with one underscore counts as the project's own if a class
in its module, or in a project module that this imports, defines it; for `self`, any class counts. So a foreign
attribute passes if the project has one of the same name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from .sources import Finding, Project

PRIVATE = re.compile(r"_(?!_)\w+")
INTERNAL = re.compile(r"(keras\.src|tensorflow\.python)(\.|$)")
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")
# Python's own private attributes: of frames, threads, processes, ctypes and named tuples.
PYTHON_PRIVATE = {
    *("_current_frames", "_getframe", "_exit", "_DummyThread", "_inheriting"),
    *("_name", "_fields", "_replace", "_asdict"),
}
OTHER_PRIVATE = {
    ("keras_ddl.serving.interfaces.connections", "_current_request"),  # aiohttp's
    ("keras_ddl.torch.rendezvous", "_rendezvous_handlers"),  # PyTorch's
}


def outside(project: Project) -> list[str]:
    return [name for name in project.modules if not name.startswith("keras_ddl.compat")]


@functools.cache
def defined_in(project: Project, module: str) -> frozenset[str]:
    """Returns the names in a module's class bodies, and the names that methods set on `self`."""
    names = set()
    for node in ast.walk(project.tree(project.modules[module])):
        if isinstance(node, ast.ClassDef):
            names |= defined_by(node.body)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return frozenset(names)


def defined_by(body: list[ast.stmt]) -> set[str]:
    names = set()
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names.update(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    return names


@functools.cache
def defined_anywhere(project: Project) -> frozenset[str]:
    return frozenset().union(*(defined_in(project, module) for module in outside(project)))


@functools.cache
def project_names(project: Project, module: str) -> frozenset[str]:
    """Returns the names that a module imports from the project."""
    return frozenset(
        alias.asname or alias.name
        for node in ast.walk(project.tree(project.modules[module]))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_ddl")
        for alias in node.names
    )


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def attributes(tree: ast.Module) -> Iterator[tuple[int, ast.expr, str]]:
    """Yields (line, object, attribute) of each access, by syntax or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.value, node.attr
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            for each in node.args if function in BY_NAME else ():
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield node.lineno, node.args[0], each.value


def private_reads(project: Project, module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    known = set(outside(project))
    near = defined_in(project, module).union(
        *(defined_in(project, each) for each in project.imports_of(module) if each in known)
    )
    for line, owner, name in attributes(tree):
        if not PRIVATE.fullmatch(name) or "ddl" in name or name in PYTHON_PRIVATE or (module, name) in OTHER_PRIVATE:
            continue  # "ddl" marks our own attributes on foreign objects
        if name in (defined_anywhere(project) if is_self(owner) else near):
            continue
        if not (isinstance(owner, ast.Name) and owner.id in project_names(project, module)):
            yield line, f"{ast.unparse(owner)}.{name}"


def internal_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the uses of keras.src and tensorflow.python: imports, `tf.python`, and names of modules in strings."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute):
            names = [re.sub(r"^tf\b", "tensorflow", ast.unparse(node))]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        yield from ((node.lineno, name) for name in names if INTERNAL.match(name))


def private_parts_are_read_in_compat(project: Project) -> Iterator[Finding]:
    """Only keras_ddl/compat/ reads private parts of TensorFlow and Keras; other modules call its functions."""
    for module in outside(project):
        path = project.modules[module]
        tree = project.tree(path)
        for line, what in [*private_reads(project, module, tree), *internal_modules(tree)]:
            yield Finding(path, line, f"{what} is private: make it a function of keras_ddl/compat/")


RULES = (private_parts_are_read_in_compat,)
