"""Training in examples/translation on two ranks equals one process."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from examples.translation_parts import corpus

from harness.examples import EXAMPLES, run

pytestmark = pytest.mark.parallel


@pytest.mark.long
def test_two_ranks_train_both_models_like_one_process(tmp_path, cut):
    files = corpus.make(tmp_path, train=320, dev=1, test=1)["train"]
    cut.save(tmp_path / "subwords")
    program = [Path(__file__).with_name("translation_program.py"), tmp_path, *files]
    env = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    run(tmp_path, sys.executable, *program, "alone", env=env)
    run(tmp_path, Path(sys.executable).with_name("keras-ddl"), "run", "-np", 2, "python", *program, "ranks", env=env)
    for model in ("transformer", "lstm"):
        alone, ranks = (np.load(tmp_path / f"{name}-{model}.npz") for name in ("alone", "ranks"))
        assert len(alone.files) > 10
        for name in alone.files:
            np.testing.assert_allclose(ranks[name], alone[name], rtol=1e-9, atol=1e-12, err_msg=f"{model} {name}")
