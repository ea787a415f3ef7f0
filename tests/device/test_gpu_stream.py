"""Where the library that knows the stream of TensorFlow's GPU comes from, and what hinders it."""

import re

import pytest

from keras_ddl import packages
from keras_ddl.compat import gpu_stream
from keras_ddl.errors import DependencyError


@pytest.mark.parametrize(
    ("is_for_cuda", "variable", "search_path", "reason"),
    [
        (True, "none", None, "KERAS_DDL_TF_STREAM=none"),
        (False, "auto", None, "not a CUDA build"),
        (True, "auto", "", r"libkeras_ddl_stream-\d+\.\d+\.\d+-\w{8}\.so is missing, and there is no g\+\+"),
        (True, "/nowhere/stream.so", None, "/nowhere/stream.so: .*No such file"),
    ],
)
def test_hindrances(monkeypatch, is_for_cuda, variable, search_path, reason):
    monkeypatch.setattr(packages, "is_for_cuda", lambda: is_for_cuda)
    monkeypatch.setenv("KERAS_DDL_TF_STREAM", variable)
    if search_path is not None:
        monkeypatch.setenv("PATH", search_path)
    with pytest.raises(DependencyError, match=reason):
        gpu_stream.build()


def test_failing_compiler_is_a_hindrance_and_leaves_nothing(monkeypatch, tmp_path):
    source = tmp_path / "gpu_stream.cc"
    source.write_text("#error not today")
    monkeypatch.setattr(packages, "is_for_cuda", lambda: True)
    monkeypatch.setattr(gpu_stream, "source", lambda: source)
    monkeypatch.setenv("KERAS_DDL_TF_STREAM", "auto")
    with pytest.raises(DependencyError, match=re.escape("not today")):
        gpu_stream.build()
    assert {each.suffix for each in tmp_path.iterdir()} == {".cc", ".lock"}
