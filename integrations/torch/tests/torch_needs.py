"""Requirements of keras_ddl.torch's tests. Does not import it, because that would slow down test collection."""

import importlib.util

import pytest

TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install '.[torch]'"
)
