"""Runs example scripts of the four kinds that DDL supported, on 2 ranks."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.examples import EXAMPLES, held_out_accuracy, run

SCRIPTS = EXAMPLES / "ddl"
DDLRUN = (Path(sys.executable).with_name("ddlrun"), "--accelerators", 2, "--mode", "p:2x1", "python")

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.long]


def run_on_two_ranks(folder, script, *arguments):
    return run(folder, *DDLRUN, SCRIPTS / script, *arguments)


def accuracy_on_two_ranks(output):
    assert "2 rank(s), held-out" in output, output
    return held_out_accuracy(output)


def test_ddl_graph_mode_learns_saves_and_resumes(tmp_path):
    assert accuracy_on_two_ranks(run_on_two_ranks(tmp_path, "graph_mode.py", "--steps", 200)) > 0.9
    alone = run(tmp_path, sys.executable, SCRIPTS / "graph_mode.py", "--steps", 10, "--resume")
    assert "rank 0 continues from step 200" in alone and "step 210, 1 rank(s)" in alone


def test_ddl_keras_learns(tmp_path):
    assert accuracy_on_two_ranks(run_on_two_ranks(tmp_path, "keras_callbacks.py", "--epochs", 6)) > 0.9


def test_ddl_three_graphs_learn(tmp_path):
    output = run_on_two_ranks(tmp_path, "sequences.py", "--steps", 300, "--evaluate-every", 150)
    evaluated = re.findall(r"^step (\d+): loss ([\d.]+), ([\d.]+) of", output, re.MULTILINE)
    assert [int(step) for step, _, _ in evaluated] == [150, 300], output[-2000:]
    assert float(evaluated[1][1]) < min(0.5, float(evaluated[0][1]))
    assert float(evaluated[1][2]) > 0.5


def test_ddl_saved_model_needs_nothing_of_keras_ddl(tmp_path):
    assert accuracy_on_two_ranks(run_on_two_ranks(tmp_path, "export_train.py")) > 0.9
    # There, neither keras_ddl nor its dependencies can be imported.
    (tmp_path / "keras_ddl.py").write_text("raise ImportError('not here')")
    clean = {"PYTHONPATH": str(tmp_path)}
    run(tmp_path, sys.executable, SCRIPTS / "export_saved_model.py", env=clean)
    serve = (
        "import numpy as np, tensorflow as tf\n"
        "held_out = np.load('export-output/digits_held_out.npz')\n"
        "model = tf.saved_model.load('export-output/saved_model/1')\n"
        "answer = model.signatures['serving_default'](images=tf.constant(held_out['images']))\n"
        "np.savez('served.npz', **{name: value.numpy() for name, value in answer.items()})\n"
    )
    run(tmp_path, sys.executable, "-c", serve, env=clean)
    served, trained = np.load(tmp_path / "served.npz"), np.load(tmp_path / "export-output" / "digits_held_out.npz")
    np.testing.assert_allclose(served["logits"], trained["logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(served["digit"], trained["logits"].argmax(1))
