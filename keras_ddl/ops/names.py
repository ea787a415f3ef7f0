"""The names by which ranks find each other's collectives.

Ranks match requests by name, and several under one name in the order in which they come. A name must therefore be the
same on every rank, and must differ between collectives that may be under way at the same time:

- Eager calls happen in program order, so all of them share one name unless they are given one. If ranks take different
  ways through a program, the first collective that differs meets another one of the same name and fails at once on
  every rank, which a name per call would turn into a wait.
- In a graph, ops run in any order: every op has a name of its own. It is made of the traced function's name and a
  number within the graph, and is therefore the same after retracing and on every rank. A given name that is used twice
  in one graph gets a number, too. Branches and loop bodies count as parts of the graph around them, but of a
  conditional's branches only one runs, on each rank perhaps another, so they count alike.
- The native kernel adds the iteration inside a loop.
- Names within a communicator that is not that of all ranks begin with its own, and are counted apart: a rank that takes
  no part in it numbers the others alike.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

EAGER = "eager"
# The core takes 1023 bytes; numbers are added to what the caller gives.
_MAX_BYTES = 900


@dataclass
class _Names:
    path: str
    used: Counter = field(default_factory=Counter)
    outer: _Names | None = None
    # By conditional: what was used when the first of its branches was traced.
    before: dict[str, Counter] = field(default_factory=dict)


_graphs: weakref.WeakKeyDictionary[Any, _Names] = weakref.WeakKeyDictionary()


def resolve(name: str | None, kind: str, prefix: str = "", communicator: int = 0) -> str:
    """Returns the match key of a collective that is made now.

    Args:
        name: what the caller gave.
        kind: a word for graphs when `name` is None, such as "all_reduce".
        prefix: put in front.
        communicator: the id of the one to count in.

    Raises:
        ConfigError: `name` is not a text of 1 to 900 bytes.
    """
    if name is not None and not (isinstance(name, str) and 0 < len(name.encode()) <= _MAX_BYTES):
        shown = name if not isinstance(name, str) or len(name) < 60 else name[:60] + "..."
        raise ConfigError(
            f"name must be a text of 1 to {_MAX_BYTES} bytes, equal on all ranks. Received: name={shown!r}. "
            "Leave it out to let keras_ddl choose."
        )
    if tf.executing_eagerly():
        return prefix + (name or EAGER)
    names = _of(tf.compat.v1.get_default_graph())
    return _unique(names, prefix + (name or f"{names.path}/{kind}"), communicator)


def derived(name: str, suffix: str) -> str:
    """Returns the name to resolve for a collective that belongs to the one called `name`, such as its gradient."""
    if name == EAGER:
        return name
    name = f"{name}/{suffix}"
    if len(name.encode()) <= _MAX_BYTES:
        return name
    return f"long/{hashlib.sha256(name.encode()).hexdigest()}/{suffix}"


def _of(graph: Any) -> _Names:
    if graph not in _graphs:
        _graphs[graph] = (
            _names_of_part(graph) if getattr(graph, "is_control_flow_graph", False) else _Names(_path(graph))
        )
    return _graphs[graph]


def _path(graph: Any) -> str:
    # A tf.function is named alike wherever it is called. A number at the end of a backward function's name counts all
    # graphs of the process, which may be more on one rank than on another.
    name = getattr(graph, "name", None) or "graph"
    return re.sub(r"_\d+$", "", name) if name.startswith("__") else name


def _names_of_part(graph: Any) -> _Names:
    outer = _of(graph.outer_graph)
    # The same number of the process is in the names of branches and loop bodies; they are counted within the outer
    # graph instead.
    conditional = re.sub(r"(?<=_grad)_\d+$", "", re.sub(r"_(true|false|branch\d+)_\d+", "", graph.name))
    used = Counter(outer.before.setdefault(conditional, Counter(outer.used)))
    path = _unique(outer, f"{outer.path}/{re.sub(r'_[0-9]+(?=_grad|$)', '', graph.name)}")
    return _Names(path, used, outer)


def _unique(names: _Names, name: str, communicator: int = 0) -> str:
    count = names.used[communicator, name]
    part: _Names | None = names
    while part is not None:  # what a branch has used is used in the graphs around it
        part.used[communicator, name] = max(part.used[communicator, name], count + 1)
        part = part.outer
    return name if count == 0 else _unique(names, f"{name}_{count}", communicator)
