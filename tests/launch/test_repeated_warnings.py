"""Warnings of several ranks are shown once; tested without processes."""

import pytest

from keras_ddl.launch.output import repeated_warnings
from launch.screens import WARNING, screen_of


def prefixed(rank: bytes, text: bytes) -> bytes:
    return b"".join(b"[%s] " % rank + line + b"\n" for line in text.splitlines())


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (1, 0, 2)])
@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (WARNING, WARNING),
        (b"/x/t.py:8: FooWarning: two\nlines\n  f(x)\n",) * 2,
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
def test_output_warning_of_some_ranks_names_them(size: int, monkeypatch: pytest.MonkeyPatch):
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


def test_output_counts_repetitions_and_keeps_other_text():
    _, err, screen, ranks = screen_of(2)
    ranks[0].feed("err", WARNING)
    ranks[1].feed("err", WARNING * 2 + b"only here: no warning\n" + WARNING.replace(b"slow", b"rank 1"))
    screen.finish()
    once, other = prefixed(b"1", WARNING), prefixed(b"1", WARNING.replace(b"slow", b"rank 1"))
    assert err.data == WARNING + b"[1] only here: no warning\n" + once + other


def test_output_text_like_a_warning_is_not_held_for_long(monkeypatch: pytest.MonkeyPatch):
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
