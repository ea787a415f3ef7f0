"""What tests of keras_ddl.torch need. Imports nothing of it: collecting tests would take seconds longer."""

import importlib.util

import pytest

TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install '.[torch]'"
)
