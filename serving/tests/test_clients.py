"""`keras-ddl predict` and the client example over both interfaces; refusals of `keras-ddl serve` at startup."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.commands import keras_ddl
from harness.serving import COMMAND

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "predict_client.py"
X = np.float32([[1, 2, 3], [4, 5, 6]])


def run(*command, status=0):
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert found.returncode == status, found.stdout + found.stderr
    return found.stdout + found.stderr


def urls(server):
    return f"http://127.0.0.1:{server.rest_port}", f"grpc://127.0.0.1:{server.grpc_port}"


def test_predict_answers_over_both_interfaces(server, tmp_path):
    np.savez(tmp_path / "rows.npz", x=X)
    for number, url in enumerate(urls(server)):
        keras_ddl("predict", url, tmp_path / "rows.npz", "-o", tmp_path / f"{number}.npz")
        with np.load(tmp_path / f"{number}.npz") as outputs:
            np.testing.assert_array_equal(outputs["y"], 3 * X)
            np.testing.assert_array_equal(outputs["total"], X.sum(1))
        # Whole numbers in JSON get the model's dtype; text stays text.
        shown = keras_ddl("predict", url, "-", "--version", 3, stdin='{"x": [[1, 2, 3]]}')
        for rows in ('{"instances": [[1, 2, 3]]}', '{"instances": [{"x": [1, 2, 3]}]}'):
            assert keras_ddl("predict", url, "-", "--version", 3, stdin=rows) == shown
        assert "y float" in shown and "[1, 3]\n[[3. 6. 9.]]" in shown, shown
        (tmp_path / "text.json").write_text('{"number": [7], "text": ["fünf 日"]}', encoding="utf-8")
        keras_ddl("predict", url, tmp_path / "text.json", "--signature", "pair", "-o", tmp_path / "text-out.json")
        assert json.loads((tmp_path / "text-out.json").read_text()) == {"text": ["fünf 日7"], "raw_bytes": ["fünf 日"]}


def test_predict_shows_and_writes_text_and_bytes_alike(server, tmp_path):
    def predict(url, rows, *words):
        return keras_ddl("predict", url, rows, "--signature", "pair", *words)

    text = ["straße fünf", "日本 😀"]
    np.savez(tmp_path / "text.npz", number=[7, 8], text=text)
    np.savez(tmp_path / "utf8.npz", number=[7, 8], text=[each.encode() for each in text])
    np.savez(tmp_path / "bytes.npz", number=[7, 8], text=[b"\xff", b"b"])
    (tmp_path / "bytes.json").write_text('{"number": [7, 8], "text": [{"b64": "/w=="}, "b"]}')
    for url in urls(server):
        for name in ("text.npz", "utf8.npz"):
            shown = predict(url, tmp_path / name)
            assert "['straße fünf7' '日本 😀8']" in shown and "['straße fünf' '日本 😀']" in shown, shown
        predict(url, tmp_path / "text.npz", "-o", tmp_path / "out.npz")
        with np.load(tmp_path / "out.npz") as outputs:
            assert outputs["text"].tolist() == ["straße fünf7", "日本 😀8"] and outputs["raw_bytes"].tolist() == text
        for name in ("bytes.npz", "bytes.json"):
            assert "[b'\\xff' b'b']" in predict(url, tmp_path / name)
        predict(url, tmp_path / "bytes.npz", "-o", tmp_path / "out.npz")
        with np.load(tmp_path / "out.npz") as outputs:
            assert outputs["raw_bytes"].tolist() == [b"\xff", b"b"]
        predict(url, tmp_path / "bytes.npz", "-o", tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text())["raw_bytes"] == [{"b64": "/w=="}, "b"]


def test_predict_shows_the_servers_error(server, tmp_path):
    np.savez(tmp_path / "rows.npz", z=X)
    for url in urls(server):
        refused = keras_ddl("predict", url, tmp_path / "rows.npz", status=1)
        assert "ServingError" in refused and "must accept the request" in refused and "takes ['x']" in refused, refused
        refused = keras_ddl("predict", url, tmp_path / "rows.npz", "--model", "other", status=1)
        assert "Servable not found" in refused, refused
        assert "The server has no model 'other', or is still loading it. Try again" in refused, refused
    assert "in .npz or .json" in keras_ddl("predict", url, tmp_path / "rows.npz", "-o", tmp_path / "out.csv", status=2)
    assert "must begin with http://" in keras_ddl("predict", "localhost:8500", tmp_path / "rows.npz", status=2)
    nobody = keras_ddl("predict", "http://127.0.0.1:1", tmp_path / "rows.npz", status=1)
    assert "no answer from http://127.0.0.1:1 (" in nobody and "refused" in nobody and "Start one" in nobody
    assert "or JSON" in keras_ddl("predict", urls(server)[0], "-", stdin="[", status=2)
    assert "gRPC port" in keras_ddl("predict", f"http://127.0.0.1:{server.grpc_port}", "-", stdin="{}", status=1)
    np.savez(tmp_path / "objects.npz", x=np.array([b"a", None]))
    assert "b64" in keras_ddl("predict", urls(server)[0], tmp_path / "objects.npz", status=2)
    unknown = keras_ddl("predict", urls(server)[0], tmp_path / "rows.npz", "--signature", "other", status=1)
    assert "serving_default" in unknown and "init_op" not in unknown


def test_predict_sends_no_number_outside_the_models_dtype(server, tmp_path):
    np.savez(tmp_path / "large.npz", x=np.array([[1.0, 1e39, 0.0]]))
    np.savez(tmp_path / "fraction.npz", number=np.array([1.5]), text=["a"])
    for number, url in enumerate(urls(server)):
        status = 1 + number  # over gRPC the model's dtypes are known before sending
        refused = keras_ddl("predict", url, tmp_path / "large.npz", status=status)
        assert "'x' takes float32: 1e+39 is beyond its range" in refused, refused
        refused = keras_ddl("predict", url, tmp_path / "fraction.npz", "--signature", "pair", status=status)
        assert "'number' takes int64" in refused and "1.5" in refused, refused


def test_client_example_works_over_both_interfaces(server, tmp_path):
    np.savez(tmp_path / "rows.npz", x=X)
    rest, grpc = urls(server)
    shown = run(sys.executable, CLIENT, tmp_path / "rows.npz", "--rest", rest)
    assert "[12. 15. 18.]" in shown, shown
    shown = run(sys.executable, CLIENT, tmp_path / "rows.npz", "--grpc", grpc.removeprefix("grpc://"), "--version", 3)
    assert "y float32 [2, 3]" in shown and "[12. 15. 18.]" in shown, shown
    failed = run(sys.executable, CLIENT, tmp_path / "rows.npz", "--rest", rest, "--model", "other", status=1)
    assert "404: Servable not found" in failed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give directories of models or --model-config-file"),
        (["nowhere"], "create it: the server waits"),
        (["a=model/7"], "Give its parent directory"),
        (["model/x"], "model/x/1', and give 'model/x'."),
        (["a=.", "a=.."], "a unique name"),
        (["a=.", "b=..", "--model-name", "c"], "for one DIRECTORY"),
        (["--model-config-file", "broken.config"], "Error parsing text-format"),
        (["--model-config-file", "twice.config"], "more than once"),
        (["a=.", "--import", "no_such_module"], "must name a Python module that is installed"),
    ],
)
def test_serve_refuses_invalid_arguments(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.config").write_text("model {")
    for version in ("model/7", "model/x"):
        (tmp_path / version).mkdir(parents=True)
        (tmp_path / version / "saved_model.pb").touch()
    one = 'config { name: "a" base_path: "/a" } '
    (tmp_path / "twice.config").write_text("model_config_list { " + 2 * one + "}")
    assert said in keras_ddl("serve", *arguments, status=2)


def test_serve_reports_a_port_in_use(server, versions):
    for option, other, port in (
        ("--port", "--rest-port", server.grpc_port),
        ("--rest-port", "--port", server.rest_port),
    ):
        taken = run(COMMAND, "serve", "--host", "127.0.0.1", versions, option, port, other, 0, status=1)
        assert str(port) in taken and f"Give another {option}" in taken and "Traceback" not in taken, taken
