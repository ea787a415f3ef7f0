"""Seeds of stateful random operations.

Such an operation is replicated, and draws the same numbers on all ranks if its seeds are equal. Without seeds
TensorFlow takes them from the process's entropy, so every rank would draw different numbers.
"""

from __future__ import annotations

import hashlib

from keras_ddl.cut.analysis.attributes import AttrValue
from keras_ddl.cut.analysis.program import Node


def agreed_seeds(node: Node, seed: int) -> dict[str, AttrValue]:
    """Returns seeds, made from `seed` and its place, for an operation that lacks seeds; else {}."""
    known = node.definition.attr
    if "seed" not in known or known["seed"].i or known["seed2"].i:
        return {}
    # Made from its place, because its name may differ between ranks.
    digest = hashlib.sha256(f"{seed}/{node.position}".encode()).digest()
    names = [each.name for each in node.operation.op_def.attr if each.name in ("seed", "seed2")]
    halves = (digest[:4], digest[4:8])
    numbers = [1 + (int.from_bytes(half, "little") & 0x3FFFFFFF) for half in halves]  # never 0, which means none
    return {name: type(known["seed"])(i=number) for name, number in zip(names, numbers)}
