"""Which sentences meet in a batch, in which order, and which of them a rank needs: from their lengths alone.

Every rank makes the same plan. Sentences of like length share a bucket, and a batch is of one bucket, padded to the
widths of the bucket; so all its rows cost the same, and ranks that share its rows evenly share its tokens evenly.

Batches must not depend on the number of ranks, and yet a rank shall hold only its share of the sentences. So a bucket's
sentences, in the order of the files, are cut into as many strips as its batches have rows, and row r of a batch is a
sentence of strip r; what an epoch shuffles is each strip. A rank computes on neighbouring rows, the same ones of every
batch: it needs the same sentences in every epoch, and most of them are of its own range of the lines.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from keras_ddl.data import chunk


@dataclass(frozen=True)
class Bucket:
    """Sentences that are padded to the same widths, and how they are dealt to batches."""

    widths: tuple[int, int]  # of source and target
    sentences: np.ndarray  # numbers of lines, ascending
    batches: int

    @property
    def rows(self) -> int:
        """Rows of a batch; `longer` batches have one more."""
        return len(self.sentences) // self.batches

    @property
    def longer(self) -> int:
        """The number of batches with one row more, which is of the last strip: it is as long as this number."""
        return len(self.sentences) % self.batches

    def deal(self, random: np.random.Generator | None) -> list[np.ndarray]:
        """Returns the sentences of each batch, a row from each strip."""
        strips = self.sentences[: self.rows * self.batches].reshape(self.rows, self.batches)
        last, places = self.sentences[self.rows * self.batches :], np.arange(self.longer)
        if random is not None:
            strips, last = random.permuted(strips, axis=1), random.permutation(last)
            places = random.choice(self.batches, self.longer, replace=False)
        dealt = list(strips.T)
        for place, sentence in zip(places, last):
            dealt[place] = np.append(dealt[place], sentence)
        return dealt

    def needed(self, rank: int, size: int) -> np.ndarray:
        """Returns the sentences of the rows that `rank` computes on: of neighbouring strips."""
        both = [chunk(self.rows, rank, size)]
        if self.longer:
            both.append(chunk(self.rows + 1, rank, size))
        both = [one for one in both if one[0] < one[1]]
        if not both:
            return self.sentences[:0]
        first, end = min(one[0] for one in both), max(one[1] for one in both)
        return self.sentences[first * self.batches : end * self.batches]


class Plan:
    """The batches of every epoch."""

    def __init__(self, lengths: np.ndarray, *, tokens: int, buckets: int, seed: int, shuffle: bool = True) -> None:
        """
        Args:
            lengths: [sentences, 2], positions of source and target with their marks; 0, 0 leaves a sentence out.
            tokens: a batch has at most so many positions, source and target together, padding counted.
            buckets: at most so many; each has batches of one shape (or two, which differ by one row).
            seed: of the orders; one of its own for each epoch. shuffle: False: one order for all, narrow buckets first.
        Raises: ValueError: a pair longer than a batch, or no pair at all.
        """
        self.lengths, self.shuffle, self.seed = lengths, shuffle, seed
        kept = np.flatnonzero(lengths.min(axis=1) > 0)
        if not len(kept):
            raise ValueError(
                f"A corpus must have a pair of sentences that can be used. Received: {len(lengths)} pairs, of which "
                "each has an empty side or is longer than `longest`."
            )
        self.left_out = len(lengths) - len(kept)
        self.buckets = []
        for members in _like_lengths(lengths[kept], tokens, buckets):
            sentences = kept[members]
            widths = tuple(int(width) for width in lengths[sentences].max(axis=0))
            rows = tokens // sum(widths)
            if rows == 0:
                raise ValueError(
                    f"tokens: a batch must hold the longest pair of sentences, padded. Received: tokens={tokens}, and "
                    f"{widths[0]} + {widths[1]} positions. Raise tokens or lower `longest`."
                )
            self.buckets.append(Bucket(widths, sentences, -(-len(sentences) // rows)))
        self.steps = sum(bucket.batches for bucket in self.buckets)
        content = np.ascontiguousarray(lengths, "<i4").tobytes() + repr((tokens, buckets, seed, shuffle)).encode()
        self.digest = hashlib.sha256(content).hexdigest()[:16]

    def epoch(self, number: int) -> list[tuple[Bucket, np.ndarray]]:
        """Returns the batches of an epoch in order, each as its bucket and the numbers of its sentences."""
        dealt = []
        for place, bucket in enumerate(self.buckets):
            random = np.random.default_rng([self.seed, number, place]) if self.shuffle else None
            dealt += [(bucket, sentences) for sentences in bucket.deal(random)]
        if self.shuffle:
            order = np.random.default_rng([self.seed, number, len(self.buckets)]).permutation(len(dealt))
            dealt = [dealt[place] for place in order]
        return _unlike_first(dealt)

    def needed(self, rank: int, size: int) -> np.ndarray:
        """Returns the numbers of the sentences that `rank` computes on in any epoch, ascending."""
        return np.sort(np.concatenate([bucket.needed(rank, size) for bucket in self.buckets]))


def _like_lengths(lengths: np.ndarray, tokens: int, buckets: int) -> list[np.ndarray]:
    """Returns the sentences of each bucket, such that there are as few padded positions as `buckets` allow.

    Buckets are intervals of the longer of both lengths, and each fills a batch, unless all together do not.
    """
    longer = lengths.max(axis=1)
    found = np.unique(longer)
    place = np.searchsorted(found, longer)
    kinds = len(found)
    widths = np.zeros([kinds, 2], np.int64)
    np.maximum.at(widths, place, lengths)
    numbers = np.bincount(place, minlength=kinds)
    # cost[i, j]: positions of one bucket of the lengths i to j.
    cost = np.full([kinds, kinds], np.inf)
    for i in range(kinds):
        padded = np.cumsum(numbers[i:]) * np.maximum.accumulate(widths[i:], axis=0).sum(axis=1)
        cost[i, i:] = np.where(padded >= tokens, padded, np.inf)
    least, cuts = cost[0].copy(), [np.zeros(kinds, np.int64)]  # of the lengths up to j, in one bucket, two, ...
    totals = [least[-1]]
    for _ in range(1, min(buckets, kinds)):
        through = least[:-1, np.newaxis] + cost[1:]  # [where the last bucket begins - 1, j]
        begin = through.argmin(axis=0)
        least = through[begin, np.arange(kinds)]
        cuts.append(begin + 1)
        totals.append(least[-1])
    edges, end = [kinds], kinds
    for level in range(int(np.argmin(totals)), 0, -1):
        end = int(cuts[level][end - 1])
        edges.append(end)
    edges = [0, *reversed(edges)]
    return [np.flatnonzero((place >= first) & (place < last)) for first, last in zip(edges, edges[1:])]


def _unlike_first(dealt: list[tuple[Bucket, np.ndarray]]) -> list[tuple[Bucket, np.ndarray]]:
    """Puts two batches first that differ in each width that differs at all.

    Keras looks at the first two, and takes a width that they share for that of all.
    """
    widths = np.array([bucket.widths for bucket, _ in dealt])
    differs = (widths != widths[0]).any(axis=0)
    for first in np.sort(np.unique(widths, axis=0, return_index=True)[1]):
        others = np.flatnonzero(((widths != widths[first]) | ~differs).all(axis=1))
        if differs.any() and len(others):
            second = others[0]
            rest = [one for place, one in enumerate(dealt) if place not in (first, second)]
            return [dealt[first], dealt[second], *rest]
    return dealt
