"""The order in which nodes are built: the program's own, of those whose inputs are there."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from keras_ddl.cut.program import Node


class Schedule:
    """Nodes that are yet to be built. Cost: O(log n) a node.

    Args:
        nodes: of one program. first: gives a node that must be made before a node, besides those it reads; or None.
    """

    def __init__(self, nodes: Sequence[Node], first: Callable[[Node], Node | None]) -> None:
        self._nodes = {node.position: node for node in nodes}
        self._readers: dict[Node, list[Node]] = {}
        self._missing: dict[Node, int] = {}
        known = set(nodes)
        for node in nodes:
            before = {*(value.node for value in node.inputs), *node.after, first(node)}
            waits_for = [each for each in before if each is not None and each in known]
            self._missing[node] = len(waits_for)
            for each in waits_for:
                self._readers.setdefault(each, []).append(node)
        self._ready = [node.position for node in nodes if not self._missing[node]]
        heapq.heapify(self._ready)
        self._postponed: list[int] = []

    def __iter__(self) -> Iterator[Node]:
        """Yields nodes that can be built, also those that can since others were: call `done` or `postpone` for each."""
        while self._ready:
            yield self._nodes[heapq.heappop(self._ready)]

    def done(self, node: Node) -> None:
        """Marks a node as built: what only waited for it can be built now."""
        for reader in self._readers.get(node, ()):
            self._missing[reader] -= 1
            if not self._missing[reader]:
                heapq.heappush(self._ready, reader.position)

    def postpone(self, node: Node) -> None:
        """Marks a node as needing more than other nodes: it is tried again after `retry`."""
        self._postponed.append(node.position)

    def postponed(self) -> list[Node]:
        """Returns the nodes that need more than other nodes."""
        return [self._nodes[each] for each in self._postponed]

    def retry(self) -> None:
        """What was postponed can be tried again."""
        self._ready, self._postponed = self._postponed, []
        heapq.heapify(self._ready)

    @property
    def is_waiting(self) -> bool:
        return bool(self._postponed)
