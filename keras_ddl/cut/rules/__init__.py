"""The rules, one file a topic, and those of operations with a row; importing this registers them (registry.py)."""

from keras_ddl.cut import factors, propagation, registry, rows  # noqa: F401  (rows registers)
from keras_ddl.cut.rules import (
    branches,
    host,
    indexing,
    lists,
    loops,
    own_statistics,
    passed_on,
    random,
    shapes,
    slices,
    tables,
    variables,
)

__all__ = [
    "branches",
    "host",
    "indexing",
    "lists",
    "loops",
    "own_statistics",
    "passed_on",
    "random",
    "shapes",
    "slices",
    "tables",
    "variables",
]

for _type in factors.rows():
    if registry.rule_of(_type) is None:
        registry.rule(_type)(propagation.propagate)
