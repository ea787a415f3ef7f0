"""The rows of operations, one file a topic; importing this registers them (factors.py says what a row is)."""

from keras_ddl.cut.rows import contractions, entrywise, images, indexing, last_axis, moved_axes, reductions

__all__ = ["contractions", "entrywise", "images", "indexing", "last_axis", "moved_axes", "reductions"]
