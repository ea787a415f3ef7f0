"""The live model as a function of its signatures' rows, for ranks that run it together (elsewhere.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keras_ddl.export import signatures
from keras_ddl.export.signatures import METHODS, Classify, Regress, declarations
from keras_ddl.export.tracing.inputs import find_inputs
from keras_ddl.export.tracing.isolation import isolated
from keras_ddl.export.tracing.tracer import own_rows


@dataclass(frozen=True)
class Live:
    """The live model, as the function of its signatures.

    Attributes: function: of the rows by name, returns the outputs by name. rows: a sample. is_given: by the user.
    """

    function: Callable[..., dict[str, Any]]
    rows: Mapping[str, Any]
    is_given: bool


def live(
    model: Any,
    *,
    sample: Any = None,
    input_signature: Any = None,
    classify: Classify | None = None,
    regress: Regress | None = None,
    signatures: Mapping[str, Any] | None = None,
) -> Live:
    """Returns the live model. The arguments are those of `write_base_graph`. Cost: one trace."""
    declared = declarations.read(signatures, functions=True, taken=METHODS)
    inputs = find_inputs(model, input_signature, sample)
    rows = inputs.made_up_sample() if sample is None else inputs.flatten(sample)
    trace = isolated(lambda: _trace(model, inputs, classify, regress, declared))
    return Live(trace.live, {**rows, **own_rows(trace, declared)}, sample is not None)


def _trace(model: Any, inputs: Any, classify: Any, regress: Any, declared: declarations.Declared) -> signatures.Trace:
    return signatures.trace(model, inputs, classify, regress, float32_outputs=True, declared=declared)
