"""Replaces attributes of other packages, and methods, values and classes of single objects. All patches use it.

`replace` lasts for the rest of the process. `set_values` returns a function that undoes it. `replace_on` replaces
methods of one object until `restore`: meanwhile, the object has a class that is derived from its own. So no class of
another package changes, and `super()` in a class of the program finds the replacement, too.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_ddl.errors import DependencyError

Table = Sequence[tuple[Any, str, Any]]
_MISSING = object()
_OWN = "keras_ddl_own_class"  # an attribute of derived classes: the class that the program has given the object


def replace(table: Table) -> None:
    """Replaces attributes for the rest of the process.

    Args:
        table: rows of (module, class or object; name of the attribute; patch). A patch is a function of the original
            and of the arguments of a call; of a property it replaces the getter. A class takes the original's place.
    Raises: DependencyError: an attribute does not exist. Nothing is replaced then.
    """
    for owner, name, _ in table:
        if not hasattr(owner, name):
            package = getattr(owner, "__module__", owner.__name__).partition(".")[0]
            version = getattr(sys.modules.get(package), "__version__", "")
            raise DependencyError(
                f"keras_ddl must replace {getattr(owner, '__qualname__', owner.__name__)}.{name}. Received: "
                f"{package} {version}, which does not have it. Install a version that keras_ddl was tested with "
                "(docs/install.md)."
            )
    for owner, name, patch in table:
        setattr(owner, name, _replacement(getattr(owner, name), patch))


def _replacement(original: Any, patch: Any) -> Any:
    if isinstance(patch, type):
        return patch
    if isinstance(original, property):
        return property(_replacement(original.fget, patch), original.fset, original.fdel)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return patch(original, *args, **kwargs)

    return replacement


def set_values(table: Table) -> Callable[[], None]:
    """Sets attributes, also new ones: rows of (owner, name, value). Returns a function that undoes it."""
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in table]
    for owner, name, value in table:
        setattr(owner, name, value)

    def undo() -> None:
        for owner, name, value in before:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    return undo


def replace_on(owner: Any, methods: Mapping[str, Any], inherited_from: type | None = None) -> None:
    """Replaces methods of one object, until `restore`.

    Args:
        methods: by name, functions or properties in place of those of the object's class; with `inherited_from` only in
            place of those that its class inherits from that class.
    """
    own, current = class_of(owner), type(owner)
    # The program may pickle the object later.
    named = {_OWN: own, "__module__": own.__module__, "__reduce_ex__": _reduce, **methods}
    if inherited_from is None or inherited_from is own:
        bases: tuple[type, ...] = (current,)
    else:  # a class between the program's class and `inherited_from`
        bases = (current, _derived((inherited_from,), methods))
        named = {name: value for name, value in named.items() if name not in methods}
    owner.__class__ = _derived(bases, named)


def exchange_class(owner: Any, kind: type) -> None:
    """Gives an object another class for good, which is derived from its own."""
    owner.__class__ = kind


def class_of(owner: Any) -> type:
    """Returns an object's class, apart from `replace_on`."""
    own: type = getattr(type(owner), _OWN, type(owner))
    return own


def restore(owner: Any, kind: type | None = None) -> None:
    """Gives an object its own class, or one that it had between two calls of `replace_on`."""
    owner.__class__ = class_of(owner) if kind is None else kind


def _derived(bases: tuple[type, ...], names: Mapping[str, Any]) -> type:
    return types.new_class(bases[0].__name__, bases, {}, lambda body: body.update(names))


def _reduce(owner: Any, protocol: Any) -> Any:
    return _new, (class_of(owner),), vars(owner)


def _new(kind: Any) -> Any:
    return kind.__new__(kind)
