"""The rules, one file per topic. Importing this package registers them, and a rule for every operation with a spec."""

from keras_ddl.cut import specs  # noqa: F401  (they register)
from keras_ddl.cut.operations import factors, propagation, registry
from keras_ddl.cut.rules import (  # noqa: F401
    branches,
    host,
    indexing,
    last_axis,
    lists,
    loops,
    random,
    shapes,
    slices,
    tables,
    variables,
)

for _type, _spec in factors.specs().items():
    if registry.rule_of(_type) is None:
        registry.rule(_type)(propagation.propagate)
    if _spec.kind in (factors.Kind.ENTRYWISE, factors.Kind.FORWARD):
        registry.rule(_type, of_replicated=True)(propagation.materialize)
