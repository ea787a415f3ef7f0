"""The screen: what reaches it, in which pieces and when. No processes."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keras_ddl.launch import output, repeated_warnings, startup_notes
from keras_ddl.launch.output import RankOutput, Screen
from keras_ddl.launch.sinks import TextSink

TRACEBACK = b"Traceback (most recent call last):\n  File x\nValueError: bad\n"


class Recorder:
    def __init__(self, terminal: bool = False):
        self.terminal = terminal
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def screen_of(num_ranks: int, terminal: bool = False):
    out, err = Recorder(terminal), Recorder(terminal)
    screen = Screen(out, err)
    return out, err, screen, [RankOutput(rank, screen) for rank in range(num_ranks)]


def test_output_of_rank_0_passes_unchanged_in_any_pieces():
    data = bytes(range(256)) * 4 + b"\nTrace\nTraceback (most\n"
    for size in (1, 2, 7, 1000):
        out, err, _, (rank,) = screen_of(1)
        for start in range(0, len(data), size):
            rank.feed("out", data[start : start + size])
            rank.feed("err", data[start : start + size])
        rank.end(failed=True)
        assert out.data == data
        assert err.data == data


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
@pytest.mark.parametrize("rank", [0, 1])
def test_output_traceback_of_a_failure_is_held_back(rank: int, size: int):
    out, err, _, ranks = screen_of(2)
    data = b"before\n" + TRACEBACK
    for start in range(0, len(data), size):
        ranks[rank].feed("err", data[start : start + size])
    prefix = b"[1] " if rank else b""
    assert err.data == prefix + b"before\n"
    assert ranks[rank].traceback_since is not None
    traceback, tail = ranks[rank].end(failed=True)
    assert traceback.encode() == TRACEBACK
    assert tail.encode() == data
    assert err.data == prefix + b"before\n"


def test_output_traceback_of_a_rank_that_goes_on_is_shown_after_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "_TRACEBACK_SECONDS", 600.0)
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", TRACEBACK)
    assert rank.tick() and err.data == b""
    monkeypatch.setattr(output, "_TRACEBACK_SECONDS", -1.0)
    assert not rank.tick()
    assert err.data == TRACEBACK
    rank.feed("err", TRACEBACK)  # the next one is held again
    assert err.data == TRACEBACK
    rank.end(failed=False)
    assert err.data == TRACEBACK * 2


UNCAUGHT = b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    import x\nImportError: x\n'


def test_output_traceback_that_goes_up_to_the_program_is_held_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "_TRACEBACK_SECONDS", 0.0)
    _, err, _, ranks = screen_of(2)
    for each in ranks:
        each.feed("err", UNCAUGHT)
        assert each.tick() and err.data == b""
        assert each.end(failed=True)[0].encode() == UNCAUGHT
    assert err.data == b""


def test_output_traceback_shown_in_place_is_still_that_of_the_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "_UNCAUGHT_SECONDS", 0.0)
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", b"unrelated\n" + UNCAUGHT)
    rank.tick()
    rank.feed("err", ONEDNN % 1)
    assert err.data.startswith(b"unrelated\n" + UNCAUGHT)
    assert rank.end(failed=True, status=1)[0].encode() == UNCAUGHT


@pytest.mark.parametrize(("status", "later"), [(-9, b""), (3, b""), (None, b""), (1, b"step 1\n"), (1, b"\rstep 1")])
def test_output_traceback_that_was_handled_is_not_that_of_the_failure(status: int | None, later: bytes, monkeypatch):
    monkeypatch.setattr(output, "_UNCAUGHT_SECONDS", 0.0)
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", UNCAUGHT)
    rank.tick()
    rank.feed("err", later)
    assert rank.end(failed=True, status=status) == ("", (UNCAUGHT + later).decode())
    assert err.data == UNCAUGHT + later


def test_output_last_lines_keep_what_follows_a_warning_without_source_line():
    _, _, _, (rank,) = screen_of(1)
    last = b"terminate called after throwing an instance of 'std::runtime_error'\n  what():  no such data\n"
    rank.feed("err", WARNING + b"<string>:1: UserWarning: foo\n" + last)
    assert rank.end(failed=True)[1].encode() == last


def test_output_last_lines_are_what_was_written_at_the_end(monkeypatch: pytest.MonkeyPatch):
    _, _, _, (rank, other) = screen_of(2)
    rank.feed("err", b"long ago\n")
    monkeypatch.setattr(output, "_PAUSE_SECONDS", 0.0)
    rank.feed("err", WARNING + b"WARNING:absl:b\nout of cheese\n" + ERROR)
    assert rank.end(failed=True)[1].encode() == b"out of cheese\n" + ERROR
    other.feed("err", b"long ago\n")
    monkeypatch.setattr(output, "_LAST_WORDS_SECONDS", 0.0)
    assert other.end(failed=True)[1] == ""


def test_output_traceback_inside_a_line_is_no_traceback():
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", b"said: ")
    rank.feed("err", TRACEBACK)
    assert err.data == b"said: " + TRACEBACK


def test_output_endless_traceback_is_not_kept():
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", TRACEBACK)
    for _ in range(10):
        rank.feed("err", b"x" * 100_000)
    assert len(err.data) > 500_000


def test_output_of_other_ranks_comes_in_whole_lines():
    out, _, _, ranks = screen_of(3)
    ranks[1].feed("out", b"a")
    ranks[2].feed("out", b"b")
    ranks[1].feed("out", b"a\nrest")
    ranks[2].feed("out", b"b\n\n")
    assert out.data == b"[1] aa\n[2] bb\n[2] \n"
    ranks[1].end(failed=False)
    assert out.data.endswith(b"[1] rest\n")


def test_output_line_without_end_is_shown_in_parts():
    out, _, _, ranks = screen_of(2)
    for _ in range(10):
        ranks[1].feed("out", b"x" * 50_000)
    assert len(out.data) > 400_000


def test_output_terminal_redraws_the_line_that_was_interrupted():
    out, _, screen, ranks = screen_of(2, terminal=True)
    ranks[0].feed("out", b"one\nstep 1\rstep 2")
    ranks[1].feed("out", b"hello\n")
    assert out.data == b"one\nstep 1\rstep 2" + b"\r\x1b[K[1] hello\n" + b"step 2"
    ranks[0].feed("out", b"\n")
    ranks[1].feed("out", b"again\n")
    assert out.data.endswith(b"step 2\n[1] again\n")
    ranks[0].feed("out", b"unfinished")
    screen.finish()
    assert out.data.endswith(b"unfinished\n")


def test_output_redraws_a_bar_that_ends_in_a_carriage_return():
    out, _, _, ranks = screen_of(2, terminal=True)
    ranks[0].feed("out", b"10%\r20%\r")
    ranks[1].feed("out", b"x\n")
    assert out.data.endswith(b"[1] x\n20%\r")


def test_output_file_is_not_torn_by_other_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output, "_UNFINISHED_QUIET_SECONDS", 600.0)
    monkeypatch.setattr(output, "_UNFINISHED_SECONDS", 600.0)
    out, _, screen, ranks = screen_of(2)
    ranks[0].feed("out", b"half")
    ranks[1].feed("out", b"other\n")
    assert screen.tick() and out.data == b"half"
    ranks[0].feed("out", b" whole\n")
    assert out.data == b"half whole\n[1] other\n"
    # A line that stays unfinished must not keep the others from being seen.
    ranks[0].feed("out", b"prompt: ")
    ranks[1].feed("out", b"more\n")
    assert screen.tick() and out.data.endswith(b"prompt: ")
    monkeypatch.setattr(output, "_UNFINISHED_QUIET_SECONDS", -1.0)
    assert not screen.tick()
    assert out.data.endswith(b"prompt: \n[1] more\n")


def test_output_progress_bar_in_a_file_does_not_hold_up_others():
    out, _, screen, ranks = screen_of(2)
    ranks[0].feed("out", b"\r1/9")
    ranks[1].feed("out", b"seen\n")
    screen.tick()
    assert out.data == b"\r1/9\n[1] seen\n"


def test_text_sink_joins_split_characters():
    stream = io.StringIO()
    sink = TextSink(stream)
    for byte in "ü€\n".encode():
        sink.write(bytes([byte]))
    sink.write(b"\xff\n")
    assert stream.getvalue() == "ü€\n\ufffd\n"


PREFACE = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
ONEDNN = b"I0000 00:00:1795426935.%06d    6131 port.cc:153] oneDNN custom operations are on. You may see ...\n"
GUARD = b"2026-01-31 12:00:%02d.000000: I tensorflow/cpu_feature_guard.cc:210] This TensorFlow binary is optimized to\n"
CPU = b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate "
CPU += b"compiler flags.\n"
ERROR = b"E0000 00:00:1795426935.000001    6131 cuda_driver.cc:7] device 3 is on fire\n"


def all_notes(number: int) -> bytes:
    return PREFACE + ONEDNN % number + GUARD % number + CPU


@pytest.mark.parametrize("size", [1, 40, 97, 10_000])
def test_output_notes_of_tensorflow_are_shown_once_a_job(size: int):
    _, err, _, ranks = screen_of(2)
    for rank, output_of_rank in enumerate(ranks):
        data = all_notes(rank) + b"own line\r\n" + all_notes(2) + ERROR
        for start in range(0, len(data), size):
            output_of_rank.feed("err", data[start : start + size])
    tails = [rank.end(failed=True)[1].encode() for rank in ranks]
    assert err.data == all_notes(0) + b"own line\r\n" + ERROR + b"[1] own line\n[1] " + ERROR
    assert tails == [b"own line\r\n" + ERROR] * 2  # what may say why it has failed


NO_GPU = b"E0000 00:00:1795426935.000001    6131 cuda_platform.cc:51] failed call to cuInit: INTERNAL: CUDA_ERROR\n"


@pytest.mark.parametrize("is_for_gpus", [True, False])
def test_output_notes_are_not_shown_where_they_are_not_wanted(is_for_gpus: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(startup_notes, "_is_for_gpus", lambda: is_for_gpus)
    out, err = Recorder(), Recorder()
    rank = RankOutput(0, Screen(out, err, shows_notes=False))
    rank.feed("err", all_notes(0) + NO_GPU + b"own line\n" + NO_GPU)
    assert err.data == (NO_GPU if is_for_gpus else b"") + b"own line\n"
    rank.feed("out", PREFACE)
    assert out.data == PREFACE


@pytest.mark.parametrize(
    ("build", "cuda", "expected"),
    [(False, True, False), (True, True, True), (True, False, False), (None, True, True), (None, False, True)],
)
def test_gpus_are_expected_by_the_tensorflow_that_is_installed(build, cuda, expected, tmp_path: Path, monkeypatch):
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
        TIME + b"F tensorflow/core/platform/cpu_feature_guard.cc:37] The TensorFlow library was compiled to",
        b"F0000 00:00:1795426935.911148    6131 cpu_feature_guard.cc:37] The TensorFlow library was compiled to",
        b"F0000 00:00:1795426935.911148    6131 cuda_platform.cc:51] failed call to cuInit: INTERNAL",
        TIME + b"E tensorflow/core/x/transport.cc:3] connection lost",
        TIME + b"E tensorflow/core/x/port.cc:3] oneDNN custom operations are on.",
        TIME + b"W tensorflow/core/x/export.cc:3] oneDNN custom operations are on.",
        TIME + b"F external/local_xla/xla/service/computation_placer.cc:93] could not find registered",
        TIME + b"W tensorflow/core/framework/local_rendezvous.cc:4] Local rendezvous is aborting: CANCELLED",
    ],
)
def test_output_line_that_is_only_like_a_note_is_shown_and_explains_a_failure(line: bytes):
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", line + b"\n")
    assert err.data == line + b"\n"
    assert rank.end(failed=True)[1].encode() == line + b"\n"


@pytest.mark.parametrize(
    "line",
    [
        b"E0000 00:00:1.1    6131 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory",
        TIME + b"E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:485] Unable to register cuFFT factory: ...",
        b"W0000 00:00:1.1    6131 computation_placer.cc:177] computation placer already registered. Please check",
        TIME + b"I external/local_xla/xla/tsl/cuda/cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU",
        TIME + b"W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT",
        TIME + b"I tensorflow/core/framework/local_rendezvous.cc:407] Local rendezvous is aborting with status: "
        b"OUT_OF_RANGE: End of sequence",
    ],
)
def test_notes_of_each_kind_explain_no_failure(line: bytes):
    assert startup_notes.without(line + b"\nmine\n") == b"mine\n"


HIDDEN = """
import os, sys
from keras_ddl.launch import startup_notes
with startup_notes.hidden():
    os.write(2, bytes.fromhex(sys.argv[1]))
    if sys.argv[2]:
        os.abort()
os.write(2, b"after" + os.environ["TF_CPP_MIN_LOG_LEVEL"].encode())
"""


@pytest.mark.parametrize(
    ("level", "dies", "shown"),
    [
        (None, "", ERROR + b"after2"),
        ("1", "", ERROR + b"after1"),
        ("0", "", all_notes(0) + ERROR + b"after0"),
        (None, "yes", ERROR),
    ],
)
def test_notes_of_a_command_are_hidden_and_nothing_else(level: str | None, dies: str, shown: bytes):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command = [sys.executable, "-c", HIDDEN, (all_notes(0) + ERROR).hex(), dies]
    environment |= {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert done.stderr == shown


STAYS = """
import os, subprocess, sys
from keras_ddl.launch import startup_notes
with startup_notes.hidden():
    os.write(2, bytes.fromhex(sys.argv[1]))
    left = subprocess.Popen(["sh", "-c", "read line; echo last >&2"], stdin=subprocess.PIPE)
    if os.fork() == 0:
        os.read(0, 1)  # a copy of this process stays, too
        os._exit(0)
os.write(2, b"after\\n")
left.communicate(b"\\n")
"""


def test_notes_of_a_command_are_hidden_though_a_process_stays():
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command = [sys.executable, "-c", STAYS, (all_notes(0) + b"own line").hex()]
    read, write = os.pipe()
    with subprocess.Popen(command, env=environment, stdin=read, stderr=subprocess.PIPE) as started:
        os.close(read)
        try:
            assert started.wait(timeout=120) == 0
        finally:
            started.kill()
            os.close(write)
        assert started.stderr is not None and started.stderr.read() == b"own lineafter\nlast\n"


def test_output_line_that_begins_like_a_note_is_shown_after_a_while(monkeypatch: pytest.MonkeyPatch):
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", PREFACE[:30])
    assert rank.tick() and err.data == b""
    monkeypatch.setattr(startup_notes, "_REST_SECONDS", 0.0)
    assert not rank.tick() and err.data == PREFACE[:30]
    rank.feed("err", b" are mine\n" + PREFACE)
    assert err.data == PREFACE[:30] + b" are mine\n" + PREFACE


def test_output_last_lines_do_not_begin_within_a_note():
    _, _, _, (rank,) = screen_of(1)
    rank.feed("err", (ONEDNN % 1).replace(b"...", b"x" * output._TAIL_BYTES) + b"own line\n")
    assert rank.end(failed=True)[1] == "own line\n"


# ---- warnings, once a job

WARNING = b"/x/train.py:8: UserWarning: slow\n  warnings.warn(text)\n"


def prefixed(rank: bytes, text: bytes) -> bytes:
    return b"".join(b"[%s] " % rank + line + b"\n" for line in text.splitlines())


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (1, 0, 2)])
@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (WARNING, WARNING),
        (b"/x/t.py:8: FooWarning: two\nlines\n  f(x)\n",) * 2,
        (b"<string>:1: DeprecationWarning: without a source line\nWARNING:absl:b\n",) * 2,
        (b"W0000 00:00:1795527410.1    11 a.cc:3] slow\n", b"W0000 00:00:1795527999.7    15 a.cc:3] slow\n"),
        (b"2026-01-31 12:00:00.1: W tensorflow/x.cc:12] a\n", b"2026-01-31 12:00:03.9: W tensorflow/x.cc:12] a\n"),
    ],
)
def test_output_warning_of_all_ranks_is_shown_once_as_rank_0_wrote_it(order, mine: bytes, others: bytes):
    _, err, screen, ranks = screen_of(3)
    for rank in order:
        ranks[rank].feed("err", mine if rank == 0 else others)
    for rank in order:
        ranks[rank].end(failed=False)
    screen.finish()
    assert err.data == mine


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_output_warning_of_some_ranks_is_shown_with_them(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repeated_warnings, "_WAIT_SECONDS", 600.0)
    _, err, screen, ranks = screen_of(4)
    for rank in (3, 1):
        for start in range(0, len(WARNING), size):
            ranks[rank].feed("err", WARNING[start : start + size])
    ranks[2].feed("err", b"other\n")
    assert screen.tick() and err.data == b"[2] other\n"
    monkeypatch.setattr(repeated_warnings, "_WAIT_SECONDS", -1.0)
    assert not screen.tick()
    assert err.data == b"[2] other\n" + prefixed(b"1,3", WARNING)


def test_output_each_repetition_counts_and_other_texts_stay():
    _, err, screen, ranks = screen_of(2)
    ranks[0].feed("err", WARNING)
    ranks[1].feed("err", WARNING * 2 + b"only here: no warning\n" + WARNING.replace(b"slow", b"rank 1"))
    screen.finish()
    once, other = prefixed(b"1", WARNING), prefixed(b"1", WARNING.replace(b"slow", b"rank 1"))
    assert err.data == WARNING + b"[1] only here: no warning\n" + once + other


def test_output_what_only_looks_like_a_warning_is_not_kept_back_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repeated_warnings, "_WAIT_SECONDS", 600.0)
    monkeypatch.setattr(repeated_warnings, "_REST_SECONDS", 600.0)
    _, err, screen, ranks = screen_of(2)
    ranks[1].feed("err", b"a:1: Warning: of one line\nand another line\n")
    assert ranks[1].tick() and err.data == b""
    monkeypatch.setattr(repeated_warnings, "_REST_SECONDS", -1.0)
    ranks[1].tick()
    assert err.data == b"[1] and another line\n"
    monkeypatch.setattr(repeated_warnings, "_WAIT_SECONDS", -1.0)
    assert not screen.tick() and not ranks[1].tick()
    assert err.data == b"[1] and another line\n[1] a:1: Warning: of one line\n"
