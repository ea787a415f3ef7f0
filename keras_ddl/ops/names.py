"""Names collectives, so that ranks match the same calls.

Ranks match requests by name, and requests with the same name in their order. A name must therefore be equal on every
rank, and must differ between collectives that may run at the same time:

- Eager calls run in program order, so all calls without a name share one name. If ranks take different paths through a
  program, the first collectives that differ match each other and fail immediately on every rank; if each call had its
  own name, the ranks would wait.
- In a graph, ops run in any order, so every op has its own name: the traced function's name and a number within the
  graph, equal after retracing and on every rank. A name that the caller uses twice in one graph gets a number, too.
  Branches and loop bodies count as parts of the graph around them. All branches of a conditional start at the same
  number, because each rank may run another one.
- The native kernel adds the iteration inside a loop.
- Names in a communicator of some ranks begin with its own name and are numbered separately, so that ranks outside of it
  number their other collectives in the same way.
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
# The core takes 1023 bytes; the rest is for numbers.
_MAX_BYTES = 900


@dataclass
class _Names:
    path: str
    used: Counter = field(default_factory=Counter)
    outer: _Names | None = None
    # Conditional -> the names used before its first branch was traced.
    before: dict[str, Counter] = field(default_factory=dict)


_graphs: weakref.WeakKeyDictionary[Any, _Names] = weakref.WeakKeyDictionary()


def resolve(name: str | None, kind: str, prefix: str = "", communicator: int = 0) -> str:
    """Returns the match key of a new collective.

    Args:
        name: the caller's.
        kind: in a graph, the last part of the name if `name` is None, such as "all_reduce".
        prefix: the prefix of the communicator.
        communicator: the id of the communicator, in which the name is numbered.

    Raises:
        ConfigError: `name` is not a string of 1 to 900 bytes.
    """
    if name is not None and not (isinstance(name, str) and 0 < len(name.encode()) <= _MAX_BYTES):
        shown = name if not isinstance(name, str) or len(name) < 60 else name[:60] + "..."
        raise ConfigError(
            f"name must be a string of 1 to {_MAX_BYTES} bytes, equal on all ranks. Received: name={shown!r}. "
            "Leave it out to let keras_ddl choose."
        )
    if tf.executing_eagerly():
        return prefix + (name or EAGER)
    names = _of(tf.compat.v1.get_default_graph())
    return _unique(names, prefix + (name or f"{names.path}/{kind}"), communicator)


def derived(name: str, suffix: str) -> str:
    """Returns the name for a collective that belongs to the one called `name`, such as its gradient."""
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
    # A tf.function has one name wherever it is called. A backward function's name ends with a count of the process's
    # graphs, which may differ between ranks.
    name = getattr(graph, "name", None) or "graph"
    return re.sub(r"_\d+$", "", name) if name.startswith("__") else name


def _names_of_part(graph: Any) -> _Names:
    outer = _of(graph.outer_graph)
    # The names of branches and loop bodies contain such a number, too: they are numbered within the outer graph.
    conditional = re.sub(r"(?<=_grad)_\d+$", "", re.sub(r"_(true|false|branch\d+)_\d+", "", graph.name))
    used = Counter(outer.before.setdefault(conditional, Counter(outer.used)))
    path = _unique(outer, f"{outer.path}/{re.sub(r'_[0-9]+(?=_grad|$)', '', graph.name)}")
    return _Names(path, used, outer)


def _unique(names: _Names, name: str, communicator: int = 0) -> str:
    count = names.used[communicator, name]
    part: _Names | None = names
    while part is not None:  # a branch's names also count as used in the enclosing graphs
        part.used[communicator, name] = max(part.used[communicator, name], count + 1)
        part = part.outer
    return name if count == 0 else _unique(names, f"{name}_{count}", communicator)
