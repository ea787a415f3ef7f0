"""Attributes of other packages are replaced permanently or temporarily (compat/replacing.py)."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest

from keras_ddl.compat import replacing
from keras_ddl.errors import DependencyError


class Base:
    def write(self) -> str:
        return "written"

    @property
    def length(self) -> int:
        return 1


class Derived(Base):
    def write(self) -> str:
        return f"derived, {super().write()}"


def owners() -> tuple[Any, Any]:
    return type("Kind", (Base,), {}), types.ModuleType("module")


def test_functions_getters_and_classes_are_replaced() -> None:
    kind, module = owners()
    module.write, module.Kind = (lambda: "one"), Base
    replacing.replace(
        [
            (kind, "write", lambda original, self: original(self).upper()),
            (kind, "length", lambda original, self: original(self) + 1),
            (module, "write", lambda original: original() + " two"),
            (module, "Kind", Derived),
        ]
    )
    assert (kind().write(), kind().length, module.write(), module.Kind) == ("WRITTEN", 2, "one two", Derived)
    one, other = kind(), kind()
    replacing.replace([(one, "write", lambda original, *args: f"of one {original(*args)}")])
    assert (one.write(), other.write()) == ("of one WRITTEN", "WRITTEN")


def test_nothing_is_replaced_if_something_is_missing() -> None:
    kind, _ = owners()
    with pytest.raises(DependencyError, match=r"must replace Kind.other. Received: .* does not have it"):
        replacing.replace([(kind, "write", Derived), (kind, "other", Derived)])
    assert kind().write() == "written"


@pytest.mark.parametrize("kind", [Base, Derived])
def test_methods_of_one_object_are_replaced_and_restored(kind: type[Base]) -> None:
    thing: Any = kind()
    thing.number = 1
    replacing.replace_on(thing, {"length": property(lambda self: self.number + 10)})
    between = type(thing)
    replacing.replace_on(thing, {"write": lambda self: "silent"}, inherited_from=Base)
    assert thing.write() == ("silent" if kind is Base else "derived, silent") and thing.length == 11
    assert isinstance(thing, kind) and type(thing).__name__ == kind.__name__ and replacing.class_of(thing) is kind
    for copied in (copy.copy(thing), pickle.loads(pickle.dumps(thing))):
        assert type(copied) is kind and copied.number == 1
    assert kind().write() == ("written" if kind is Base else "derived, written")
    replacing.restore(thing, between)
    assert thing.write() == kind().write() and thing.length == 11
    replacing.restore(thing)
    assert type(thing) is kind


def test_values_and_classes_of_one_object_are_exchanged() -> None:
    thing, other = Base(), Base()
    undo = replacing.set_values([(thing, "write", lambda: "set")])
    assert (thing.write(), other.write()) == ("set", "written")
    undo()
    assert thing.write() == "written" and not vars(thing)
    replacing.exchange_class(thing, Derived)
    assert (thing.write(), other.write()) == ("derived, written", "written")
