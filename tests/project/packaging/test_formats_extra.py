"""Installs the extras `onnx` and `tflite` beside `cpu`, and runs the format tests there."""

import sys

import pytest

from harness.packaging_tools import ROOT, make_venv, run

pytestmark = [pytest.mark.packaging, pytest.mark.long]


def test_format_extras_convert(wheel, work, tmp_path):
    venv = make_venv(work / "formats")
    venv.pip_install(f"{wheel}[cpu,onnx,tflite]", "pytest>=8", "pytest-xdist>=3.8")
    run(sys.executable, "-m", "pip", "--python", venv.python, "check", cwd=tmp_path)
    tests = ROOT / "export" / "tests" / "test_formats.py"
    shown = run(venv.path / "bin" / "pytest", "-q", "-m", "", tests, cwd=ROOT, timeout=1500)
    assert " passed" in shown and "skipped" not in shown, shown
