"""The specs of operations (operations/factors.py), one file per topic. Importing this package registers them."""

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
