"""Matches the variables of a model with those in a checkpoint, even if Keras has numbered their names differently."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.snapshot import WEIGHTS
from keras_ddl.errors import CheckpointError

Table: TypeAlias = Sequence[Sequence[Any]]  # rows [key, dtype name, shape]


def match(targets: Table, stored: Table, what: str, source: Path | str) -> dict[str, str]:
    """Returns target key -> stored key for every row of `targets`.

    Keras numbers names differently in each process (`dense_7` may have been `dense`), and their scopes may differ, too.
    If keys differ, variables are matched in order. The ends of their names (layer and weight, or the optimizer's slot)
    without numbers, their dtypes and their shapes must then all agree.
    Raises: CheckpointError: they do not agree; the message names the first difference.
    """
    here = {key: (dtype, tuple(shape)) for key, dtype, shape in targets}
    there = {key: (dtype, tuple(shape)) for key, dtype, shape in stored}
    if set(here) == set(there):
        pairs = {key: key for key in here}
    else:
        pairs = dict(zip(here, there))
        differs = next((pair for pair in pairs.items() if _end_of_name(pair[0]) != _end_of_name(pair[1])), None)
        if len(here) != len(there) or differs:
            where = (
                f"{bundle.name_of(differs[1])} there, {bundle.name_of(differs[0])} here"
                if differs
                else "one list ends early"
            )
            _other_model(source, f"{len(there)} {what}s there, {len(here)} here; first difference: {where}")
    for target, key in pairs.items():
        if here[target] != there[key]:
            _other_model(source, f"{bundle.name_of(target)} is {_show(there[key])} there, {_show(here[target])} here")
    return pairs


def table(variables: Mapping[str, Any]) -> Table:
    """Returns [key, dtype name, shape] of each variable, in order, for `match` and state.json."""
    return [[key, dtype_of(variable), list(variable.shape)] for key, variable in variables.items()]


def dtype_of(variable: Any) -> str:
    """Returns the name of a variable's dtype."""
    import tensorflow as tf

    return str(tf.as_dtype(variable.dtype).name)


def _end_of_name(key: str) -> str:
    parts = 2 if key.startswith(WEIGHTS) else 1
    return re.sub(r"_\d+(?=/|_|$)", "", "/".join(bundle.name_of(key).split("/")[-parts:]))


def _show(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]}{list(spec[1])}"


def _other_model(source: Path | str, difference: str) -> NoReturn:
    raise CheckpointError(
        f"A checkpoint must be restored into the model it was saved from. Received: {source}, a checkpoint of another "
        f"model: {difference}. Build the same model, or give another checkpoint."
    )
