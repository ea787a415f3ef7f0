"""The subwords of examples/translation, and how ranks share lines."""

from __future__ import annotations

import functools
import gzip
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from examples.translation_parts import lines, on_ranks, subwords

FILES = {
    "as written": "eins\nzwei\ndrei\nvier\nfünf\nsechs\nsieben\n",
    "no line break at the end": "a\nbb\nccc\nd",
    "empty lines": "\n\nÄ\n\n\nö\n\n",
    "line breaks of Windows": "ein Satz\r\nnoch einer\r\n",
    "uneven": "x\n" * 3 + "lang " * 500 + "\n" + "y\n" * 9,
    "one line": "allein\n",
    "none": "",
}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_lines_of_all_ranks_make_up_the_files(tmp_path, ending, size):
    for name, text in FILES.items():
        expected = [line.strip() for line in text.split("\n")]
        expected = expected[:-1] if expected[-1] == "" else expected
        # The second file has other bytes for the same lines, so a rank's byte ranges do not match.
        contents = {"source": text, "target": "".join(f"{i} {'z' * (i % 3 * 40)}\n" for i in range(len(expected)))}
        paths = []
        for side, content in contents.items():
            paths.append(tmp_path / f"{name}.{side}{ending}")
            paths[-1].write_bytes(gzip.compress(content.encode()) if ending else content.encode())
        got = on_ranks(size, functools.partial(lines.read_range, paths))
        assert [total for total, _ in got] == [len(expected)] * size
        assert [line for _, (source, _) in got for line in source] == expected, name
        assert [line.split()[0] for _, (_, target) in got for line in target] == [str(i) for i in range(len(expected))]
        assert [len(source) for _, (source, _) in got] == list(np.diff(lines.ranges(len(expected), size)))


def test_rank_reads_only_its_lines(tmp_path, monkeypatch):
    path, read = tmp_path / "long", [0] * 4
    path.write_bytes(b"some twenty letters.\n" * 50_000)

    class Counting:
        def __init__(self, file, rank):
            self.file, self.rank, self.seek = file, rank, file.seek

        def read(self, count):
            read[self.rank] += count
            return self.file.read(count)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    real, this = Path.open, threading.local()

    def read_range(ranks):
        this.rank = ranks.rank
        return lines.read_range([path], ranks)

    monkeypatch.setattr(Path, "open", lambda self, mode: Counting(real(self, mode), this.rank))
    assert [len(texts[0]) for _, texts in on_ranks(4, read_range)] == [12_500] * 4
    share = path.stat().st_size / 4
    assert all(2 * share - 50 < one < 3 * share + 50 for one in read), (read, share)


def test_files_of_unequal_length_are_refused(tmp_path):
    (tmp_path / "a").write_text("1\n2\n")
    (tmp_path / "b").write_text("1\n")
    for size in (1, 2):
        with pytest.raises(ValueError, match="as many lines in each of its files"):
            on_ranks(size, lambda ranks: lines.read_range([tmp_path / "a", tmp_path / "b"], ranks))


def test_subwords_restore_sentences(cut, texts, tmp_path):
    ids = cut.encode(texts[1])
    assert cut.decode(ids) == texts[1]
    assert cut.decode([[subwords.BEGIN, *ids[0], subwords.END, 17, 17], []]) == [texts[1][0], ""]
    assert min(map(min, ids)) > subwords.END and max(map(max, ids)) < len(cut) <= 300
    cut.save(tmp_path / "model")
    again = subwords.train([*texts[0], *texts[1]], 300)
    for other in (subwords.Subwords.load(tmp_path / "model"), pickle.loads(pickle.dumps(cut)), again):
        assert other.model == cut.model and other.encode(texts[1][:50]) == ids[:50]


def test_text_that_is_not_utf_8_is_refused_with_its_line(tmp_path):
    (tmp_path / "latin").write_bytes("gut\nfünf\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"must be UTF-8. Received: b'f\\xfcnf.* in .*latin"):
        lines.read_lines(tmp_path / "latin")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfone\n")
    assert lines.read_lines(tmp_path / "marked") == ["one"]
