"""Exporting for TensorFlow Serving without the training script: base graph, graft, proof (export/docs/export.md).

`write_base_graph` runs in training, on rank 0; `export_saved_model` needs neither Keras nor the model's code.
Importing this package imports no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_ddl.export.formats import export_format
    from keras_ddl.export.graft import ExportResult, export_saved_model
    from keras_ddl.export.graph_mode import export_graph
    from keras_ddl.export.inference.inputs import inputs_are_known, record_inputs
    from keras_ddl.export.manifest import is_name
    from keras_ddl.export.proof.check import CheckReport, check_saved_model
    from keras_ddl.export.proof.scan import scan_saved_model
    from keras_ddl.export.proof.validate import CleanProcess, validate_saved_model
    from keras_ddl.export.signatures import Classify, Regress
    from keras_ddl.export.signatures.encoded_images import EncodedImages
    from keras_ddl.export.signatures.functions import Function
    from keras_ddl.export.tracing.base_graph import BaseGraph, write_base_graph

_MODULES = {
    "formats": "export_format",
    "graft": "ExportResult export_saved_model",
    "graph_mode": "export_graph",
    "inference.inputs": "inputs_are_known record_inputs",
    "manifest": "is_name",
    "proof.check": "CheckReport check_saved_model",
    "proof.scan": "scan_saved_model",
    "proof.validate": "CleanProcess validate_saved_model",
    "signatures": "Classify Regress",
    "signatures.encoded_images": "EncodedImages",
    "signatures.functions": "Function",
    "tracing.base_graph": "BaseGraph write_base_graph",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "BaseGraph",
    "CheckReport",
    "Classify",
    "CleanProcess",
    "EncodedImages",
    "ExportResult",
    "Function",
    "Regress",
    "check_saved_model",
    "export_format",
    "export_graph",
    "export_saved_model",
    "inputs_are_known",
    "is_name",
    "record_inputs",
    "scan_saved_model",
    "validate_saved_model",
    "write_base_graph",
]


if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
