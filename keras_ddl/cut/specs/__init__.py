"""The specs of operations, one file a topic; importing this registers them (factors.py says what a spec is)."""

from keras_ddl.cut.specs import (  # noqa: F401  (they register)
    contractions,
    entrywise,
    forwarding,
    images,
    indexing,
    last_axis,
    matrices,
    moved_axes,
    ragged,
    reductions,
    shape_arithmetic,
)
