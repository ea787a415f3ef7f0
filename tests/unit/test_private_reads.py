"""What TensorFlow and Keras keep private is read in keras_ddl/compat/ only, as the syntax trees show.

A syntax tree does not say whose an object is. An attribute with one underscore counts as the project's own where its
module, or one of the project that this imports, has a class that defines it, and of `self` where any class does. What
this takes for the project's own by mistake is a name that both have.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from harness.source_modules import MODULES, imports_of

PRIVATE = re.compile(r"_(?!_)\w+")
INTERNAL = re.compile(r"(keras\.src|tensorflow\.python)(\.|$)")
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")
# Python's own: of frames, threads, processes, ctypes and named tuples.
OF_PYTHON = {
    *(
        "_current_frames",
        "_getframe",
        "_exit",
        "_DummyThread",
        "_inheriting",
        "_name",
        "_fields",
        "_replace",
        "_asdict",
    ),
}
OF_OTHERS = {
    ("keras_ddl.serving.connections", "_current_request"),  # aiohttp's
    ("keras_ddl.torch.rendezvous", "_rendezvous_handlers"),  # PyTorch's, in the room that knows PyTorch
}
OUTSIDE = [name for name in MODULES if not name.startswith("keras_ddl.compat")]


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@functools.cache
def defined_in(module: str) -> frozenset[str]:
    """Names in the bodies of a module's classes, and those that their methods set on `self`."""
    names = set()
    for node in ast.walk(tree_of(module)):
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


def is_module_of_ours(module: str, owner: ast.expr) -> bool:
    """Whether `owner` is a name that the module has imported from the project."""
    return isinstance(owner, ast.Name) and any(
        (alias.asname or alias.name) == owner.id
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_ddl")
        for alias in node.names
    )


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@functools.cache
def defined_anywhere() -> frozenset[str]:
    return frozenset().union(*(defined_in(module) for module in OUTSIDE))


def attributes(tree: ast.Module) -> Iterator[tuple[int, ast.expr, str]]:
    """(line, object, attribute) of all that is read or written, by syntax or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.value, node.attr
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            for each in node.args if function in BY_NAME else ():
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield node.lineno, node.args[0], each.value


def private_reads(module: str, tree: ast.Module) -> list[str]:
    near = defined_in(module).union(*(defined_in(each) for each in imports_of(module) if each in OUTSIDE))
    return [
        f"line {line}: {ast.unparse(owner)}.{name}"
        for line, owner, name in attributes(tree)
        if PRIVATE.fullmatch(name)
        and "ddl" not in name  # ours, on an object of theirs
        and name not in OF_PYTHON
        and (module, name) not in OF_OTHERS
        and name not in (defined_anywhere() if is_self(owner) else near)
        and not is_module_of_ours(module, owner)
    ]


def internal_modules(tree: ast.Module) -> list[str]:
    """Uses of keras.src and tensorflow.python: imports, `tf.python`, and names of modules in strings."""
    found = []
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
        found += [f"line {node.lineno}: {name}" for name in names if INTERNAL.match(name)]
    return found


@pytest.mark.parametrize("module", OUTSIDE)
def test_private_parts_of_tensorflow_and_keras_are_read_in_compat(module: str) -> None:
    tree = tree_of(module)
    assert private_reads(module, tree) + internal_modules(tree) == [], "make it a function of keras_ddl/compat/"


@pytest.mark.parametrize(
    "program",
    [
        "model._flatten_layers()",
        "[each for each in optimizer._trainable_variables]",
        "getattr(callback, '_should_save_model', None)",
        "self._container_strategy()",
        "layer._non_trainable_variables = []",
        "from keras.src.trainers import trainer",
        "import tensorflow.python.eager.context as context",
        "tf.python.framework.ops.Graph",
        "importlib.import_module('keras.src.utils')",
    ],
)
def test_private_reads_are_seen(program: str) -> None:
    tree = ast.parse(program)
    assert private_reads("keras_ddl.strategy.fits", tree) + internal_modules(tree) != []


@pytest.mark.parametrize("program", ["self._of_one_rank()", "tape._ddl_reduction", "os._exit(1)", "model.__dict__"])
def test_what_is_public_or_the_projects_own_is_no_private_read(program: str) -> None:
    tree = ast.parse(program)
    assert private_reads("keras_ddl.strategy.keras_patches.callbacks", tree) + internal_modules(tree) == []
