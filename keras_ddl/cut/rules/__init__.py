"""The rules, one file a topic; importing this registers them (registry.py says what a rule is)."""

from keras_ddl.cut.rules import (
    branches,
    contractions,
    convolutions,
    elementwise,
    host,
    indexing,
    lists,
    loops,
    losses,
    random,
    reductions,
    shapes,
    slices,
    strings,
    tables,
    variables,
)

__all__ = [
    "branches",
    "contractions",
    "convolutions",
    "elementwise",
    "host",
    "indexing",
    "lists",
    "loops",
    "losses",
    "random",
    "reductions",
    "shapes",
    "slices",
    "strings",
    "tables",
    "variables",
]
