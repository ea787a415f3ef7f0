"""The screen: which output reaches it, in which pieces and when; tested without processes."""

import io

import pytest

from keras_ddl.launch.output import screen as screen_module
from keras_ddl.launch.output.sinks import TextSink
from launch.screens import ERROR, ONEDNN, WARNING, screen_of

TRACEBACK = b"Traceback (most recent call last):\n  File x\nValueError: bad\n"


def test_output_of_rank_0_passes_unchanged():
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


def test_output_traceback_of_a_continuing_rank_is_shown_after_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(screen_module, "_TRACEBACK_SECONDS", 600.0)
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", TRACEBACK)
    assert rank.tick() and err.data == b""
    monkeypatch.setattr(screen_module, "_TRACEBACK_SECONDS", -1.0)
    assert not rank.tick()
    assert err.data == TRACEBACK
    rank.feed("err", TRACEBACK)  # the next traceback is held again
    assert err.data == TRACEBACK
    rank.end(failed=False)
    assert err.data == TRACEBACK * 2


UNCAUGHT = b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    import x\nImportError: x\n'


def test_output_traceback_from_the_programs_top_is_held_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(screen_module, "_TRACEBACK_SECONDS", 0.0)
    _, err, _, ranks = screen_of(2)
    for each in ranks:
        each.feed("err", UNCAUGHT)
        assert each.tick() and err.data == b""
        assert each.end(failed=True)[0].encode() == UNCAUGHT
    assert err.data == b""


def test_output_shown_traceback_still_explains_the_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(screen_module, "_UNCAUGHT_SECONDS", 0.0)
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", b"unrelated\n" + UNCAUGHT)
    rank.tick()
    rank.feed("err", ONEDNN % 1)
    assert err.data.startswith(b"unrelated\n" + UNCAUGHT)
    assert rank.end(failed=True, status=1)[0].encode() == UNCAUGHT


@pytest.mark.parametrize(("status", "later"), [(-9, b""), (3, b""), (None, b""), (1, b"step 1\n"), (1, b"\rstep 1")])
def test_output_handled_traceback_does_not_explain_the_failure(status: int | None, later: bytes, monkeypatch):
    monkeypatch.setattr(screen_module, "_UNCAUGHT_SECONDS", 0.0)
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", UNCAUGHT)
    rank.tick()
    rank.feed("err", later)
    assert rank.end(failed=True, status=status) == ("", (UNCAUGHT + later).decode())
    assert err.data == UNCAUGHT + later


def test_output_last_lines_include_text_after_a_warning_without_source_line():
    _, _, _, (rank,) = screen_of(1)
    last = b"terminate called after throwing an instance of 'std::runtime_error'\n  what():  no such data\n"
    rank.feed("err", WARNING + b"<string>:1: UserWarning: foo\n" + last)
    assert rank.end(failed=True)[1].encode() == last


def test_output_last_lines_are_the_last_written(monkeypatch: pytest.MonkeyPatch):
    _, _, _, (rank, other) = screen_of(2)
    rank.feed("err", b"long ago\n")
    monkeypatch.setattr(screen_module, "_PAUSE_SECONDS", 0.0)
    rank.feed("err", WARNING + b"WARNING:absl:b\nout of cheese\n" + ERROR)
    assert rank.end(failed=True)[1].encode() == b"out of cheese\n" + ERROR
    other.feed("err", b"long ago\n")
    monkeypatch.setattr(screen_module, "_LAST_WORDS_SECONDS", 0.0)
    assert other.end(failed=True)[1] == ""


def test_output_traceback_text_inside_a_line_is_no_traceback():
    _, err, _, (rank,) = screen_of(1)
    rank.feed("err", b"said: ")
    rank.feed("err", TRACEBACK)
    assert err.data == b"said: " + TRACEBACK


@pytest.mark.parametrize(("rank", "stream", "start"), [(0, "err", TRACEBACK), (1, "out", b"")])
def test_output_endless_traceback_is_shown_in_parts(rank: int, stream: str, start: bytes):
    out, err, _, ranks = screen_of(2)
    for data in (start, *[b"x" * 50_000] * 20):
        ranks[rank].feed(stream, data)
    assert len((out if stream == "out" else err).data) > 500_000


def test_output_of_other_ranks_is_shown_in_complete_lines():
    out, _, _, ranks = screen_of(3)
    ranks[1].feed("out", b"a")
    ranks[2].feed("out", b"b")
    ranks[1].feed("out", b"a\nrest")
    ranks[2].feed("out", b"b\n\n")
    assert out.data == b"[1] aa\n[2] bb\n[2] \n"
    ranks[1].end(failed=False)
    assert out.data.endswith(b"[1] rest\n")


def test_output_terminal_redraws_an_interrupted_line():
    out, _, screen, ranks = screen_of(2, terminal=True)
    ranks[0].feed("out", b"one\nstep 1\rstep 2")
    ranks[1].feed("out", b"hello\n")
    assert out.data == b"one\nstep 1\rstep 2" + b"\r\x1b[K[1] hello\n" + b"step 2"
    ranks[0].feed("out", b"\n")
    ranks[1].feed("out", b"again\n")
    assert out.data.endswith(b"step 2\n[1] again\n")
    ranks[0].feed("out", b"10%\r20%\r")
    ranks[1].feed("out", b"x\n")
    assert out.data.endswith(b"[1] x\n20%\r")
    ranks[0].feed("out", b"unfinished")
    screen.finish()
    assert out.data.endswith(b"unfinished\n")


def test_output_file_lines_are_not_split_by_other_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(screen_module, "_UNFINISHED_QUIET_SECONDS", 600.0)
    monkeypatch.setattr(screen_module, "_UNFINISHED_SECONDS", 600.0)
    out, _, screen, ranks = screen_of(2)
    ranks[0].feed("out", b"\r1/9")  # a progress bar
    ranks[1].feed("out", b"seen\n")
    screen.tick()
    assert out.data == b"\r1/9\n[1] seen\n"
    out, _, screen, ranks = screen_of(2)
    ranks[0].feed("out", b"half")
    ranks[1].feed("out", b"other\n")
    assert screen.tick() and out.data == b"half"
    ranks[0].feed("out", b" whole\n")
    assert out.data == b"half whole\n[1] other\n"
    # An unfinished line must not hide the others.
    ranks[0].feed("out", b"prompt: ")
    ranks[1].feed("out", b"more\n")
    assert screen.tick() and out.data.endswith(b"prompt: ")
    monkeypatch.setattr(screen_module, "_UNFINISHED_QUIET_SECONDS", -1.0)
    assert not screen.tick()
    assert out.data.endswith(b"prompt: \n[1] more\n")


def test_text_sink_joins_split_characters():
    stream = io.StringIO()
    sink = TextSink(stream)
    for byte in "ü€\n".encode():
        sink.write(bytes([byte]))
    sink.write(b"\xff\n")
    assert stream.getvalue() == "ü€\n\ufffd\n"
