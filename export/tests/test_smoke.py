"""Exports a small model and checks its outputs."""

from pathlib import Path

import numpy as np
from export_helpers import ask, exported
from export_zoo import ZOO


def test_small_model_is_exported_checked_and_run(tmp_path: Path) -> None:
    model, sample = ZOO["sequential_cnn"]()
    result = exported(model, tmp_path, sample)
    assert "as the trained model did" in result.proof
    answer = ask(result.path, inputs=np.asarray(sample))["output_0"]
    np.testing.assert_allclose(answer, model(sample, training=False), rtol=1e-5, atol=1e-6)
