"""The extra `serving`, which brings the full tensorflow. Beside tensorflow-cpu is how `make setup` installs it."""

import json
import re
import subprocess
import sys
import urllib.request

import pytest

from harness.packaging_tools import clean_environment, make_venv, run

pytestmark = [pytest.mark.packaging, pytest.mark.long]

MODEL = """
import tensorflow as tf

model = tf.Module()
model.scale = tf.function(lambda x: {"y": 2 * x}, input_signature=[tf.TensorSpec([None], tf.float32, "x")])
tf.saved_model.save(model, "saved_model/1", {"serving_default": model.scale})
"""


def test_the_serving_extra_serves(wheel, work, tmp_path):
    venv = make_venv(work / "serving")
    venv.pip_install(f"{wheel}[serving]")
    pip = (sys.executable, "-m", "pip", "--python", venv.python)
    assert "Name: tensorflow\n" in run(*pip, "show", "tensorflow", cwd=tmp_path)
    run(*pip, "check", cwd=tmp_path)
    run(venv.python, "-c", MODEL, cwd=tmp_path)
    command = [venv.path / "bin" / "keras-ddl", "serve", "saved_model", "--host", "127.0.0.1"]
    with subprocess.Popen(
        [*map(str, command), "--port", "0", "--rest-port", "0", "--access-log", "-"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        lines = []
        try:
            for line in server.stdout:
                lines.append(line)
                if "available (loaded" in line:
                    break
            found = re.search(r"REST on (http://\S+)", "".join(lines))
            assert found and server.poll() is None, lines
            body = json.dumps({"instances": [1.0, 2.0]}).encode()
            with urllib.request.urlopen(f"{found[1]}/v1/models/model:predict", body, timeout=60) as answer:
                assert json.load(answer) == {"predictions": [2.0, 4.0]}
        finally:
            server.terminate()
            rest = server.stdout.read()
        assert '"method": "Predict"' in rest, rest
        assert server.wait(60) == 0
