"""Plans batches from the lengths of sentences: which sentences share a batch, in which order, and which a rank needs.

Every rank makes the same plan. Sentences of similar length share a bucket, and each batch comes from one bucket and is
padded to the bucket's widths. So all rows of a batch cost the same, and ranks with equally many rows have equally many
tokens.

Batches must not depend on the number of ranks, and yet a rank should hold only its share of the sentences. So a
bucket's sentences, in the order of the files, are split into as many strips as its batches have rows. Row r of a batch
is a sentence of strip r, and each epoch shuffles every strip. A rank computes on the same neighbouring rows of every
batch, so it needs the same sentences in every epoch, and most of them are in its own range of lines.
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
        """Rows of a batch. Some batches have one more; see `longer`."""
        return len(self.sentences) // self.batches

    @property
    def longer(self) -> int:
        """The number of batches with one more row, and the length of the last strip, from which this row comes."""
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
        """Returns the sentences of the rows that `rank` computes on, which are neighbouring strips."""
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
            lengths: [sentences, 2], positions of source and target with their marks; (0, 0) leaves a sentence out.
            tokens: the largest number of positions in a batch, source and target together, with padding.
            buckets: the largest number of buckets. All batches of a bucket have one shape, or two that differ by a row.
            seed: seed of the order, which differs by epoch. shuffle: False: all epochs begin with narrow buckets.
        Raises: ValueError: a pair is longer than a batch, or there is no pair.
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
        for members in _similar_lengths(lengths[kept], tokens, buckets):
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
        """Returns the batches of an epoch in order: (bucket, numbers of the sentences)."""
        dealt = []
        for place, bucket in enumerate(self.buckets):
            random = np.random.default_rng([self.seed, number, place]) if self.shuffle else None
            dealt += [(bucket, sentences) for sentences in bucket.deal(random)]
        if self.shuffle:
            order = np.random.default_rng([self.seed, number, len(self.buckets)]).permutation(len(dealt))
            dealt = [dealt[place] for place in order]
        return _different_first(dealt)

    def needed(self, rank: int, size: int) -> np.ndarray:
        """Returns the numbers of the sentences that `rank` computes on in any epoch, ascending."""
        return np.sort(np.concatenate([bucket.needed(rank, size) for bucket in self.buckets]))


def _similar_lengths(lengths: np.ndarray, tokens: int, buckets: int) -> list[np.ndarray]:
    """Returns the sentences of each bucket, with as little padding as `buckets` buckets allow.

    Buckets are intervals of the longer of both lengths. Each fills a batch, unless all sentences together do not.
    """
    longer = lengths.max(axis=1)
    found = np.unique(longer)
    place = np.searchsorted(found, longer)
    kinds = len(found)
    widths = np.zeros([kinds, 2], np.int64)
    np.maximum.at(widths, place, lengths)
    numbers = np.bincount(place, minlength=kinds)
    # cost[i, j]: positions of one bucket with the lengths i to j.
    cost = np.full([kinds, kinds], np.inf)
    for i in range(kinds):
        padded = np.cumsum(numbers[i:]) * np.maximum.accumulate(widths[i:], axis=0).sum(axis=1)
        cost[i, i:] = np.where(padded >= tokens, padded, np.inf)
    least, cuts = cost[0].copy(), [np.zeros(kinds, np.int64)]  # for the lengths up to j in one bucket, two buckets, ...
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


def _different_first(dealt: list[tuple[Bucket, np.ndarray]]) -> list[tuple[Bucket, np.ndarray]]:
    """Puts two batches first that differ in every width that differs in any two batches.

    Keras looks at the first two batches, and assumes that a width that they share is that of all batches.
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
