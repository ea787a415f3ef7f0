"""Checks the contents of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl.checkpoint.bundle_index import stored_boxes
from keras_ddl.checkpoint.choosing import refuse, require_intact
from keras_ddl.checkpoint.listing import Checkpoint
from keras_ddl.checkpoint.tensor_bundle import name_of
from keras_ddl.files import digests
from keras_ddl.state.boxes import without_all
from keras_ddl.state.placements import replicated


def validate(checkpoint: Checkpoint) -> None:
    """Compares every file of a checkpoint with its SHA-256, and checks that bundles have all entries of variables.

    Several ranks may have written parts of a variable. Cost: one read, at about 1 GB/s.

    Raises: CheckpointError: a file is missing, truncated or altered; entries of a variable are missing.
    """
    validate_files(checkpoint)
    validate_entries(checkpoint)


def validate_files(checkpoint: Checkpoint) -> None:
    """Does the first part of `validate`. It needs no TensorFlow, so it can run while another thread imports that."""
    require_intact(checkpoint)
    state = checkpoint.state or {}
    problem = digests.difference(checkpoint.path, state["files"], contents=True)
    if problem is not None:
        refuse(checkpoint.path, problem)


def validate_entries(checkpoint: Checkpoint) -> None:
    """Does the second part of `validate`, which imports TensorFlow."""
    state = checkpoint.state or {}
    for prefix, name in ((checkpoint.weights, "weights"), (checkpoint.optimizer, "optimizer")):
        problem = _missing_entries(prefix, state.get(name) or ())
        if problem is not None:
            refuse(checkpoint.path, problem)


def _missing_entries(prefix: str, table: Sequence[Sequence[Any]]) -> str | None:
    """Describes the first entries that a bundle lacks; None if it has all.

    table: a row [key, dtype, shape] for each variable.
    """
    if not table:
        return None
    try:
        stored = stored_boxes(prefix)
    except OSError as error:
        return f"{prefix}.index cannot be read: {error}"
    for key, _, shape in table:
        lacking = without_all(replicated(shape)[0], stored.get(key, ()))
        if lacking:
            return f"{name_of(key)} {list(shape)} lacks the entries {lacking[0]}"
    return None
