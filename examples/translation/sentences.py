"""Keeps pairs of sentences as subwords in a few arrays, by line number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from translation.lines import Ranks
from translation.subwords import PADDING, Subwords

_AT_A_TIME = 10_000


class Sentences:
    """Some pairs of sentences of a corpus.

    Attributes:
        numbers: line numbers of the pairs, ascending.
        ids: subwords of all source and target sentences, one after the other.
        starts: [2 * pairs + 1]: the index in `ids` at which each source and, after it, its target begins.
    """

    def __init__(self, numbers: np.ndarray, ids: np.ndarray, starts: np.ndarray) -> None:
        self.numbers, self.ids, self.starts = numbers, ids, starts

    @classmethod
    def encoded(cls, first: int, texts: Sequence[Sequence[str]], subwords: Subwords) -> Sentences:
        """Returns lines as subwords.

        Args:
            first: the number of the first line. texts: equally many lines of source and target.
        """
        source, target = texts
        # 16 bits hold the ids of all but the largest vocabularies.
        dtype = np.uint16 if len(subwords) <= 1 << 16 else np.int32
        parts, lengths = [np.zeros(0, dtype)], [np.zeros(0, np.int64)]
        for begin in range(0, len(source), _AT_A_TIME):
            end = begin + _AT_A_TIME
            both = [None] * (2 * len(source[begin:end]))
            both[::2], both[1::2] = subwords.encode(source[begin:end]), subwords.encode(target[begin:end])
            lengths.append(np.fromiter(map(len, both), np.int64, len(both)))
            parts.append(np.fromiter((one for row in both for one in row), dtype, int(lengths[-1].sum())))
        starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        return cls(np.arange(first, first + len(source)), np.concatenate(parts), starts)

    def lengths(self) -> np.ndarray:
        """Returns the subwords of source and target, [pairs, 2] int32."""
        return np.diff(self.starts).reshape(-1, 2).astype(np.int32)

    def take(self, numbers: np.ndarray) -> Sentences:
        """Returns the pairs of `numbers` (ascending) that this object has."""
        return self._at(np.flatnonzero(np.isin(self.numbers, numbers)))

    def exchanged(self, needed: np.ndarray, ranks: Ranks) -> Sentences:
        """Returns the pairs `needed` (ascending), and gets missing pairs from other ranks. COLLECTIVE.

        Cost: each rank receives all pairs that any rank lacks, a few per thousand if the corpus is not sorted.
        """
        lacking = ranks.all_gather(np.setdiff1d(needed, self.numbers, assume_unique=True))
        given = ranks.all_gather(self.take(np.unique(np.concatenate(lacking))))
        here = [self.take(needed), *(one.take(lacking[ranks.rank]) for one in given)]
        whole = Sentences(
            np.concatenate([one.numbers for one in here]),
            np.concatenate([one.ids for one in here]),
            np.concatenate([[0], np.cumsum(np.concatenate([np.diff(one.starts) for one in here]))]),
        )
        return whole._at(np.argsort(whole.numbers))

    def padded(self, numbers: np.ndarray, side: int, width: int) -> np.ndarray:
        """Returns the ids of pairs in any order, [pairs, width] int32, padded at the end. side: 0 source, 1 target.

        Raises: KeyError: a pair is not here.
        """
        places = np.searchsorted(self.numbers, numbers)
        found = places < len(self.numbers)
        if not (found.all() and (self.numbers[places] == numbers).all()):
            raise KeyError(
                "A rank only has its own rows of each batch. Received: a request for other rows. Ask for rows of "
                "keras_ddl.data.chunk(batches.batch_rows(index), rank, size)."
            )
        begin, end = self.starts[2 * places + side], self.starts[2 * places + side + 1]
        inside = np.arange(width) < (end - begin)[:, np.newaxis]
        padded = np.full([len(numbers), width], PADDING, np.int32)
        padded[inside] = self.ids[(begin[:, np.newaxis] + np.arange(width))[inside]]
        return padded

    def _at(self, places: np.ndarray) -> Sentences:
        lengths, begin = np.diff(self.starts).reshape(-1, 2)[places], self.starts[2 * places]
        sizes = lengths.sum(axis=1)
        before = np.concatenate([[0], np.cumsum(sizes)])
        positions = np.arange(before[-1]) + np.repeat(begin - before[:-1], sizes)
        starts = np.concatenate([[0], np.cumsum(lengths.ravel())])
        return Sentences(self.numbers[places], self.ids[positions], starts)
