"""Reads a rank's range of the lines of two parallel files, without reading all of the files.

The bytes of each file are split into one part per rank. Each rank counts the lines that begin in its part, and the
ranks exchange their counts. Then each rank knows the number of its first line, and the rank in whose part this line
begins tells it the position in bytes. So a rank reads two or three parts of a plain file, to count, find and keep
lines. A gzip file can only be read from its beginning, so a rank reads all of it twice, and keeps its own lines.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import keras_ddl

_CHUNK = 1 << 20


class Ranks(NamedTuple):
    """This process's rank, the number of ranks, and a function that exchanges objects."""

    rank: int = 0
    size: int = 1
    all_gather: Callable[[Any], list[Any]] = lambda mine: [mine]  # returns the objects of all ranks; COLLECTIVE

    @classmethod
    def current(cls) -> Ranks:
        """Returns keras_ddl's ranks after `keras_ddl.Strategy()` or `init()`, and a single rank before."""
        if not keras_ddl.is_initialized():
            return cls()
        return cls(keras_ddl.rank(), keras_ddl.size(), keras_ddl.all_gather_object)


def ranges(total: int, size: int) -> list[int]:
    """Returns the first line of each of `size` ranks' ranges in `total` lines, and the end of the last range."""
    return [total * rank // size for rank in range(size + 1)]


def read_range(paths: Sequence[str | Path], ranks: Ranks) -> tuple[int, list[list[str]]]:
    """Returns the total number of lines, and this rank's lines of each file, in order. COLLECTIVE.

    Args:
        paths: UTF-8 files with equally many lines; gzip if the name ends in .gz.
    Raises: ValueError: the files have different numbers of lines (on all ranks).
    Cost: reads at most 3/size of the bytes of plain files; all of gzip files, twice.
    """
    rank, size, all_gather = ranks
    mine = [_Counted(Path(path), rank, size) for path in paths]
    counts = all_gather([file.count for file in mine])
    totals = [
        counts[0][number] if file.is_gzip else sum(each[number] for each in counts) for number, file in enumerate(mine)
    ]
    if len(set(totals)) > 1:
        named = ", ".join(f"{path}: {total}" for path, total in zip(paths, totals))
        raise ValueError(
            "A parallel corpus must have as many lines in each of its files, because line n of one is the translation "
            f"of line n of the other. Received: {named} (rank {rank}). Look for line breaks inside sentences."
        )
    total = totals[0]
    bounds = ranges(total, size)
    # The rank in whose part a range's first line begins knows its position in bytes.
    found: list[dict[int, int]] = []
    for number, file in enumerate(mine):
        before = sum(each[number] for each in counts[:rank])
        found.append({} if file.is_gzip else file.offsets(bounds, before))
    everyone = all_gather(found)
    first, end = bounds[rank], bounds[rank + 1]
    texts = []
    for number, file in enumerate(mine):
        if file.is_gzip:
            texts.append(file.lines(first, end))
        else:
            offsets = {line: place for each in everyone for line, place in each[number].items()}
            texts.append(file.between(offsets.get(first, file.bytes), offsets.get(end, file.bytes)))
    return total, texts


def read_lines(path: str | Path) -> list[str]:
    """Returns all lines of a file, plain or gzip."""
    path = Path(path)
    with _open(path) as file:
        return [_text(line, path) for line in file]


def sample(path: str | Path, count: int, places: int = 64) -> list[str]:
    """Returns about `count` lines spread over the file, or all lines if there are fewer.

    From a gzip file it returns the first lines.

    Cost: only reads `count` lines of the file.
    """
    path = Path(path)
    length, places = path.stat().st_size, min(places, count)
    lines: list[str] = []
    with _open(path) as file:
        if path.suffix == ".gz" or length <= 200 * count:  # reading a small file completely is faster than seeking
            everything = [line for _, line in zip(range(count if path.suffix == ".gz" else length), file)]
            step = max(1, len(everything) // count)
            return [_text(line, path) for line in everything[::step][:count]]
        for place in range(places):
            file.seek(length * place // places)
            if place:
                file.readline()
            lines += [_text(line, path) for _, line in zip(range(count // places), file)]
    return lines


class _Counted:
    """A file and the number of lines in this rank's part of it (in all of it for a gzip file)."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.path, self.is_gzip = path, path.suffix == ".gz"
        self.bytes = path.stat().st_size
        # A line belongs to the part that contains the byte before it, so the first line of the file is special.
        self.begin, self.end = self.bytes * rank // size, self.bytes * (rank + 1) // size
        self.is_first = rank == 0
        if self.is_gzip:
            with _open(path) as file:
                self.count = sum(1 for _ in file)
        else:
            self.count = sum(1 for _ in self._begins())

    def _begins(self) -> Iterator[int]:
        """Yields the byte at which each line of this part begins: 0 on the first rank, and after each line break."""
        if self.is_first and self.bytes:
            yield 0
        with self.path.open("rb") as file:
            file.seek(self.begin)
            place = self.begin
            while place < self.end:
                chunk = file.read(min(_CHUNK, self.end - place))
                if not chunk:
                    return
                at = chunk.find(b"\n")
                while at >= 0:
                    if place + at + 1 < self.bytes:  # no line begins after the last line break
                        yield place + at + 1
                    at = chunk.find(b"\n", at + 1)
                place += len(chunk)

    def offsets(self, bounds: Sequence[int], before: int) -> dict[int, int]:
        """Returns bound -> the byte at which that line begins, for bounds whose lines begin in this part."""
        wanted = {bound - before for bound in bounds if before <= bound < before + self.count}
        return {before + line: byte for line, byte in enumerate(self._begins()) if line in wanted} if wanted else {}

    def between(self, first: int, end: int) -> list[str]:
        with self.path.open("rb") as file:
            file.seek(first)
            text = file.read(end - first)
        return [_text(line, self.path) for line in text.split(b"\n")[: None if text and text[-1:] != b"\n" else -1]]

    def lines(self, first: int, end: int) -> list[str]:
        with _open(self.path) as file:
            return [_text(line, self.path) for number, line in zip(range(end), file) if number >= first]


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _text(line: bytes, path: Path) -> str:
    try:
        return line.decode().strip().lstrip("\ufeff")  # a byte order mark, with which some files begin
    except UnicodeDecodeError:
        raise ValueError(
            f"Text must be UTF-8. Received: {line[:60]!r} in {path}. Convert the file, for example with iconv."
        ) from None
