"""A rank's range of the lines of two parallel files, of which it reads its share only.

The files are cut into as many parts of equal bytes as there are ranks. Each rank counts the lines that begin in its
part, the ranks tell each other, and then each knows at which line its range begins, and is told by the rank whose part
holds that line where it lies. So of a plain file a rank reads two or three shares, to count, to find and to keep. A
gzip file has no places to begin at: it is read through twice, and only the rank's lines are kept.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import keras_ddl

_CHUNK = 1 << 20


class Ranks(NamedTuple):
    """Which rank this process is, of how many, and how they tell each other things."""

    rank: int = 0
    size: int = 1
    all_gather: Callable[[Any], list[Any]] = lambda mine: [mine]  # what every rank has given, by rank; COLLECTIVE

    @classmethod
    def of_job(cls) -> Ranks:
        """Returns those of keras_ddl, after `keras_ddl.Strategy()` or `init()`; before, a process is alone."""
        if not keras_ddl.is_initialized():
            return cls()
        return cls(keras_ddl.rank(), keras_ddl.size(), keras_ddl.all_gather_object)


def ranges(total: int, size: int) -> list[int]:
    """Returns where the ranges of `size` ranks begin in `total` lines, and the end of the last one."""
    return [total * rank // size for rank in range(size + 1)]


def read_range(paths: Sequence[str | Path], ranks: Ranks) -> tuple[int, list[list[str]]]:
    """Returns the number of all lines, and of each file this rank's lines: as many of each, in order. COLLECTIVE.

    Args:
        paths: plain, or gzip where the name ends in .gz; all of equally many lines, in UTF-8.
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
    # Where each range begins in bytes is known to the rank in whose part that line begins.
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
    """Returns about `count` lines, spread over the file; fewer if it has fewer. Of a gzip file the first ones.

    Cost: reads `count` lines, and no more of the file.
    """
    path = Path(path)
    length, places = path.stat().st_size, min(places, count)
    lines: list[str] = []
    with _open(path) as file:
        if path.suffix == ".gz" or length <= 200 * count:  # that small, reading it whole is quicker than jumping
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
    """A file of which this rank has counted its part: of a gzip file, all of it."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.path, self.is_gzip = path, path.suffix == ".gz"
        self.bytes = path.stat().st_size
        # A line belongs to the part that holds the byte before it, so that the first one has to be given away.
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
                    if place + at + 1 < self.bytes:  # the last line break begins no line
                        yield place + at + 1
                    at = chunk.find(b"\n", at + 1)
                place += len(chunk)

    def offsets(self, bounds: Sequence[int], before: int) -> dict[int, int]:
        """Returns the byte at which line `bound` begins, of those bounds whose lines begin in this part."""
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
        return line.decode().strip().lstrip("\ufeff")  # with which some begin a file
    except UnicodeDecodeError:
        raise ValueError(
            f"Text must be UTF-8. Received: {line[:60]!r} in {path}. Convert the file, by iconv for example."
        ) from None
