"""Locates a model's variables in a file of tf.train.Checkpoint, by the object graph in the file.

Three ways lead to a variable. tf.train.Checkpoint follows the attributes of the model, but Keras 3.15 hides layers in
lists, dicts and nested tuples from it. The optimizer lists all trainable variables, even of hidden layers, in the
model's order. And `model_state.trackable` adds a complete list. Other objects in the file, and the names of all
objects, do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.compat.names import plain_name
from keras_ddl.errors import ExportError
from keras_ddl.export.manifest import Manifest
from keras_ddl.model_state import COMPLETE

_TRAINED = "_trainable_variables"


def places_in_objects(model: Any, keyed: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns key -> names of the attributes that tf.train.Checkpoint follows from the model to the variable."""
    import tensorflow as tf

    wanted = {id(variable): key for key, variable in keyed.items()}
    wanted |= {id(variable.value): key for key, variable in keyed.items()}
    view = tf.train.TrackableView(model)
    places: dict[str, list[str]] = {}
    seen = {id(model)}
    queue: list[tuple[Any, list[str]]] = [(model, [])]
    for each, path in queue:
        if id(each) in wanted:
            places.setdefault(wanted[id(each)], path)
        for name, child in view.children(each).items():
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((child, [*path, name]))
    return places


class ObjectGraph:
    """The object graph in a file. `entries`: the tensors in the file, key -> (dtype, shape)."""

    def __init__(self, graph: Any, entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._children = [{child.local_name: child.node_id for child in node.children} for node in graph.nodes]
        self._values: list[tuple[str, str] | None] = [None] * len(graph.nodes)  # (tensor, name) of variables
        self._entries = entries
        for number, node in enumerate(graph.nodes):
            for each in node.attributes:
                if each.name == "VARIABLE_VALUE" and each.checkpoint_key in entries:
                    self._values[number] = each.checkpoint_key, each.full_name

    def resolve(self, base: Manifest, keys: Sequence[str]) -> dict[str, str]:
        """Returns key -> tensor in the file, for the object that has the most of `keys`. Leaves out keys that it lacks.

        Raises: ExportError: several objects in the file match the model, and have different variables.
        """
        specs = {key: (dtype, tuple(shape)) for key, dtype, shape in base["variables"]}
        candidates = []
        for names, nodes in self._candidates(base, specs):
            tensors = {
                key: value[0] for key in keys if key in nodes and (value := self._values[nodes[key]]) is not None
            }
            candidates.append((names, tensors))
        most = max((len(tensors) for _, tensors in candidates), default=0)
        best = [(names, tensors) for names, tensors in candidates if len(tensors) == most]
        named = [(names, tensors) for names, tensors in best if base.name in names]
        best = named or best
        if most == len(keys) and len({tuple(sorted(tensors.items())) for _, tensors in best}) > 1:
            raise ExportError(
                "Exactly one object in a TensorFlow checkpoint must match the model. Received: "
                f"{', '.join(sorted(' '.join(names) for names, _ in best))}, which all match. Give a file that holds "
                "only one of these objects, or give the model in training the same name as in the file: "
                "ExportBase(serve=...)."
            )
        return best[0][1] if best else {}

    def _candidates(self, base: Manifest, specs: Mapping[str, Any]) -> Iterator[tuple[list[str], dict[str, int]]]:
        """Yields (names of an object, key -> node of each variable that it leads to), for each possible model."""
        names: list[list[str]] = [[] for _ in self._children]
        for children in self._children:
            for name, child in children.items():
                names[child].append(name)
        names[0] = ["(the root)"]
        optimizers = [node for node, children in enumerate(self._children) if _TRAINED in children]
        first = {path[0] for path in base["objects"].values() if path}
        for start, children in enumerate(self._children):
            if COMPLETE in children:
                listed = self._listed(children[COMPLETE])
                for order in (base["own"], list(specs)):
                    if self._is_of(order, listed, specs):
                        yield names[start], dict(zip(order, listed))
            if first & set(children) or (start == 0 and not first):  # without `first`, all layers are hidden
                nodes = {key: self._walk(start, path) for key, path in base["objects"].items()}
                known = {key: node for key, node in nodes.items() if node is not None}
                yield names[start], known
                for optimizer in optimizers:
                    is_own = children.get("optimizer") == optimizer
                    completed = self._completed(known, self._children[optimizer], is_own, base, specs)
                    if completed is not None:
                        yield names[start], completed

    def _completed(
        self,
        known: dict[str, int],
        optimizer: Mapping[str, int],
        is_own: bool,
        base: Manifest,
        specs: Mapping[str, Any],
    ) -> dict[str, int] | None:
        """Completes `known` by the optimizer's variables. Returns None if the optimizer does not train this model.

        Args:
            known: variables that the object leads to by attributes.
            is_own: whether the object was compiled with this optimizer.
        """
        order, trained = base["trainable"], self._listed(optimizer[_TRAINED])
        if not order or not self._is_of(order, trained, specs):
            return None
        ours = dict(zip(order, trained))
        if any(known.get(key, node) != node for key, node in ours.items()):
            return None
        # Slots (momenta) are named after layer and variable, so their names show the order.
        lists = [self._listed(node) for name, node in optimizer.items() if name not in (_TRAINED, "_variables")]
        named = [[(self._values[node] or ("", ""))[1] for node in each] for each in lists if len(each) == len(order)]
        paths = [bundle.name_of(key) for key in order]
        for slots in named:
            ends = ["_".join(path.partition("#")[0].split("/")[-2:]) for path in paths]
            same = all(plain_name(end) in plain_name(slot) for end, slot in zip(ends, slots))
            if not same or _ranks(slots) != _ranks(paths):
                return None
        # Without slots, the order is the model's if Keras built the optimizer. Otherwise variables of equal name and
        # shape cannot be distinguished.
        alike = [(plain_name(path.partition("#")[0].rpartition("/")[2]), specs[key]) for key, path in zip(order, paths)]
        hidden = [each for key, each in zip(order, alike) if key not in known]
        if not named and len(set(hidden)) < len(hidden) and not (is_own and set(known) & set(ours)):
            return None
        return {**known, **ours}

    def _is_of(self, order: Sequence[str], nodes: Sequence[int], specs: Mapping[str, Any]) -> bool:
        """Whether the nodes may be these variables: number, dtypes, shapes and the ends of names agree."""
        values = [self._values[node] for node in nodes]
        return len(order) == len(nodes) and all(
            value is not None
            and self._entries[value[0]] == specs[key]
            and plain_name(value[1]).endswith(plain_name(bundle.name_of(key).partition("#")[0].rpartition("/")[2]))
            for key, value in zip(order, values)
        )

    def _listed(self, node: int) -> list[int]:
        children = self._children[node]
        return [children[str(number)] for number in range(len(children)) if str(number) in children]

    def _walk(self, node: int, path: Sequence[str]) -> int | None:
        current: int | None = node
        for name in path:
            current = None if current is None else self._children[current].get(name)
        return current


def _ranks(names: Sequence[str]) -> list[int]:
    """Returns the rank of each name among the names that differ from it only in numbers."""
    numbered = []
    for name in names:
        numbers: list[int] = []
        for word in re.split("[/_#]", name):
            if word.isdigit() and numbers:
                numbers[-1] = int(word)
            else:
                numbers.append(0)
        numbered.append((plain_name(name.partition("#")[0]), numbers))
    groups: dict[str, list[list[int]]] = {}
    for group, numbers in sorted(numbered):
        groups.setdefault(group, []).append(numbers)
    return [groups[group].index(numbers) for group, numbers in numbered]
