"""Which tensors a model takes: names, dtypes and shapes of the serving signature."""

from __future__ import annotations

from typing import Any


def inputs_are_known(model: Any) -> bool:
    """Whether `write_base_graph` can trace `model` now, without input_signature= or sample=.

    True for Functional and built Sequential models, and after `record_inputs` has seen the first call.
    """
    raise NotImplementedError


def record_inputs(model: Any) -> None:
    """Notes dtypes and shapes of a subclassed model's next call (Keras keeps only shapes).

    Call it in on_train_begin; after the first train batch `inputs_are_known(model)` is True.
    """
    raise NotImplementedError
