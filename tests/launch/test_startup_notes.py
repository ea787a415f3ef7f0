"""TensorFlow's startup notes are shown once per job, and do not explain a failure; tested with few processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.waiting import LIMIT_SECONDS
from keras_ddl.launch.output import startup_notes
from keras_ddl.launch.output.screen import RankOutput, Screen
from launch.screens import CPU, ERROR, GUARD, ONEDNN, PREFACE, Recorder, screen_of


def all_notes(number: int) -> bytes:
    return PREFACE + ONEDNN % number + GUARD % number + CPU


@pytest.mark.parametrize("size", [1, 40, 97, 10_000])
def test_output_shows_tensorflows_notes_once_per_job(size: int):
    _, err, _, ranks = screen_of(2)
    for rank, output_of_rank in enumerate(ranks):
        data = all_notes(rank) + b"own line\r\n" + all_notes(2) + ERROR
        for start in range(0, len(data), size):
            output_of_rank.feed("err", data[start : start + size])
    tails = [rank.end(failed=True)[1].encode() for rank in ranks]
    assert err.data == all_notes(0) + b"own line\r\n" + ERROR + b"[1] own line\n[1] " + ERROR
    assert tails == [b"own line\r\n" + ERROR] * 2  # the error, which may explain a failure, is kept


NO_GPU = b"E0000 00:00:1795426935.000001    6131 cuda_platform.cc:51] failed call to cuInit: INTERNAL: CUDA_ERROR\n"


@pytest.mark.parametrize("is_for_gpus", [True, False])
def test_output_hides_notes_on_request(is_for_gpus: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(startup_notes, "_is_for_gpus", lambda: is_for_gpus)
    out, err = Recorder(), Recorder()
    rank = RankOutput(0, Screen(out, err, shows_notes=False))
    rank.feed("err", all_notes(0) + NO_GPU + b"own line\n" + NO_GPU)
    assert err.data == (NO_GPU if is_for_gpus else b"") + b"own line\n"
    rank.feed("out", PREFACE)
    assert out.data == PREFACE


@pytest.mark.parametrize(
    ("build", "cuda", "expected"),
    [(False, True, False), (True, True, True), (True, False, False), (None, False, True)],
)
def test_gpus_are_expected_if_tensorflow_supports_them(build, cuda, expected, tmp_path: Path, monkeypatch):
    if build is not None:
        file = tmp_path / "tensorflow/python/platform/build_info.py"
        file.parent.mkdir(parents=True)
        (tmp_path / "tensorflow/__init__.py").touch()
        file.write_text(f"build_info = collections.OrderedDict([('is_cuda_build', {build}), ('is_rocm_build', False)])")
    (tmp_path / "cuda").mkdir()
    monkeypatch.setattr(startup_notes, "_CUDA", [str(tmp_path / ("cuda" if cuda else "none"))])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    assert startup_notes._is_for_gpus.__wrapped__() is expected


TIME = b"2026-01-31 12:00:00.1: "


@pytest.mark.parametrize(
    "line",
    [
        b"F0000 00:00:1795426935.911148    6131 cpu_feature_guard.cc:37] The TensorFlow library was compiled to",
        TIME + b"E tensorflow/core/x/transport.cc:3] connection lost",
        TIME + b"E tensorflow/core/x/port.cc:3] oneDNN custom operations are on.",
        TIME + b"W tensorflow/core/x/export.cc:3] oneDNN custom operations are on.",
        TIME + b"W tensorflow/core/framework/local_rendezvous.cc:4] Local rendezvous is aborting: CANCELLED",
    ],
)
def test_output_line_similar_to_a_note_is_shown_and_explains_a_failure(line: bytes):
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", line + b"\n")
    assert err.data == line + b"\n"
    assert rank.end(failed=True)[1].encode() == line + b"\n"


@pytest.mark.parametrize(
    "line",
    [
        b"E0000 00:00:1.1    6131 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory",
        b"W0000 00:00:1.1    6131 computation_placer.cc:177] computation placer already registered. Please check",
        TIME + b"I external/local_xla/xla/tsl/cuda/cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU",
        TIME + b"W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT",
        TIME + b"I tensorflow/core/framework/local_rendezvous.cc:407] Local rendezvous is aborting with status: "
        b"OUT_OF_RANGE: End of sequence",
    ],
)
def test_notes_of_each_kind_explain_no_failure(line: bytes):
    assert startup_notes.without(line + b"\nmine\n") == b"mine\n"


# A child process and a forked copy stay for longer.
HIDDEN = """
import os, subprocess, sys
from keras_ddl.launch.output import startup_notes
with startup_notes.hidden():
    os.write(2, bytes.fromhex(sys.argv[1]))
    if sys.argv[2]:
        os.abort()
    left = subprocess.Popen(["sh", "-c", "read line; echo last >&2"], stdin=subprocess.PIPE)
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
os.write(2, b"after" + os.environ["TF_CPP_MIN_LOG_LEVEL"].encode())
left.communicate(b"\\n")
"""


@pytest.mark.parametrize(
    ("level", "dies", "shown"),
    [
        (None, "", ERROR + b"after2last\n"),
        ("0", "", all_notes(0) + ERROR + b"after0last\n"),
        (None, "yes", ERROR),
    ],
)
def test_only_notes_of_a_command_are_hidden(level: str | None, dies: str, shown: bytes):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    command = [sys.executable, "-c", HIDDEN, (all_notes(0) + ERROR).hex(), dies]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        try:
            started.wait(timeout=LIMIT_SECONDS)
        finally:
            started.kill()
            started.stdin.close()
        assert started.stderr.read() == shown


def test_output_beginning_of_a_note_is_shown_after_a_while(monkeypatch: pytest.MonkeyPatch):
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", PREFACE[:30])
    assert rank.tick() and err.data == b""
    monkeypatch.setattr(startup_notes, "_REST_SECONDS", 0.0)
    assert not rank.tick() and err.data == PREFACE[:30]
    rank.feed("err", b" are mine\n" + PREFACE)
    assert err.data == PREFACE[:30] + b" are mine\n" + PREFACE
