"""The rules, one file a topic; importing this registers them (registry.py says what a rule is)."""

from keras_ddl.cut.rules import (
    contractions,
    convolutions,
    elementwise,
    host,
    indexing,
    losses,
    random,
    reductions,
    shapes,
    slices,
    variables,
)

__all__ = [
    "contractions",
    "convolutions",
    "elementwise",
    "host",
    "indexing",
    "losses",
    "random",
    "reductions",
    "shapes",
    "slices",
    "variables",
]
