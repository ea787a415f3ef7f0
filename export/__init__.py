"""Exporting for TensorFlow Serving without the training script: base graph, graft, proof (docs/export.md).

`write_base_graph` runs in training, on rank 0; `export_saved_model` needs neither Keras nor the model's code.
Importing this package imports no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "BaseGraph": "tracing.base_graph",
    "write_base_graph": "tracing.base_graph",
    "inputs_are_known": "tracing.inputs",
    "is_name": "manifest",
    "record_inputs": "tracing.inputs",
    "CheckReport": "proof.check",
    "CleanProcess": "proof.validate",
    "ExportResult": "graft",
    "check_saved_model": "proof.check",
    "export_format": "formats",
    "export_graph": "sources.graph_mode",
    "export_saved_model": "graft",
    "Classify": "signatures",
    "EncodedImages": "signatures.encoded_images",
    "Function": "signatures.functions",
    "Regress": "signatures",
    "scan_saved_model": "proof.scan",
    "validate_saved_model": "proof.validate",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
