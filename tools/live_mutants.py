"""Applies a mutant to a running process: replaces the code of its functions, or imports the mutated module."""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mutations import PACKAGE, Mutant, source_of, tree_of

Place = tuple[str, int]  # a function's qualified name and first line in its file


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of all functions in a module's code, including nested functions."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & inspect.CO_OPTIMIZED:  # otherwise a class body
                yield each
            yield from _functions_in(each)


def _on_import(code: CodeType) -> list[CodeType]:
    """Returns the code that runs on import, without functions: of the module and of its class bodies."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    own = code.replace(co_consts=tuple(None if each in inner else each for each in code.co_consts))
    bodies = (each for each in inner if not each.co_flags & inspect.CO_OPTIMIZED)
    return [own, *(part for each in bodies for part in _on_import(each))]


def changed_functions(mutant: Mutant, path: str) -> dict[Place, CodeType] | None:
    """Returns the new code of the functions that a mutant changes; None if it changes code that runs on import."""
    old, new = (compile(tree, path, "exec") for tree in (ast.parse(source_of(mutant.file)), tree_of(mutant)))
    if _on_import(old) != _on_import(new):
        return None
    before = {(each.co_qualname, each.co_firstlineno): each for each in _functions_in(old)}
    after = {(each.co_qualname, each.co_firstlineno): each for each in _functions_in(new)}
    return {place: code for place, code in after.items() if code != before.get(place)}


class LiveFunctions:
    """All function objects of the package in this process, wherever they are referenced."""

    def __init__(self) -> None:
        self._by_file: dict[str, dict[Place, list[FunctionType]]] = {}
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__module__ and each.__module__.startswith(PACKAGE):
                code = each.__code__
                functions = self._by_file.setdefault(code.co_filename, {})
                functions.setdefault((code.co_qualname, code.co_firstlineno), []).append(each)

    def change(self, mutant: Mutant) -> list[tuple[FunctionType, CodeType]] | None:
        """Applies a mutant to this process. Returns the input of `restore`, or None if the mutant needs an import."""
        path = sys.modules[mutant.module].__file__
        assert path is not None
        codes = changed_functions(mutant, path)
        if codes is None:
            return None
        functions = [each for place in codes for each in self._by_file.get(path, {}).get(place, ())]
        if not functions:
            return None
        before = [(each, each.__code__) for each in functions]
        try:
            for each in functions:
                each.__code__ = codes[each.__code__.co_qualname, each.__code__.co_firstlineno]
        except ValueError:  # the new code closes over fewer variables
            self.restore(before)
            return None
        return before

    @staticmethod
    def restore(before: Iterable[tuple[FunctionType, CodeType]]) -> None:
        """Undoes `change`."""
        for function, code in before:
            function.__code__ = code


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a syntax tree."""

    def __init__(self, name: str, tree: ast.Module, path: str) -> None:
        self._name, self._code, self._path = name, compile(tree, path, "exec"), path

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        return importlib.util.spec_from_loader(name, self, origin=self._path) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._path
        exec(self._code, module.__dict__)
