"""Pickles functions by value, with their file and line numbers.

Since version 3.1.3, cloudpickle drops a function's file. Tracebacks of ranks, and warnings about ranks that others wait
for, would then not name the user's line.
"""

from __future__ import annotations

import io
import operator
from types import CodeType
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is CodeType and obj.co_filename:
            # Loading it needs only the standard library.
            return operator.methodcaller("replace", co_filename=obj.co_filename), (obj.replace(co_filename=""),)
        return super().reducer_override(obj)


def dumps(obj: Any) -> bytes:
    """Returns `obj` pickled, with functions and classes of a script or notebook, lambdas and closures by value."""
    with io.BytesIO() as file:
        _Pickler(file, protocol=5).dump(obj)
        return file.getvalue()
