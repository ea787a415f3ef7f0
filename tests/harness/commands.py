"""Runs keras-ddl in the tests' process, so that TensorFlow is imported once instead of by each command."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from keras_ddl.cli import main


def keras_ddl(*words: object, status: int = 0, stdin: str = "") -> str:
    """Returns the output of `keras-ddl words`; fails the test unless the command ended with `status`."""
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        redirected = contextlib.redirect_stdout(written), contextlib.redirect_stderr(written)
        with redirected[0], redirected[1], pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
    assert ended.value.code == status, written.getvalue()
    return written.getvalue()
