"""Batches of a number of tokens for any Keras model: one process and many ranks train on the same ones.

    strategy = keras_ddl.Strategy(seed=1)
    batches = Batches(("data/train.en", "data/train.de"), subwords, tokens=4096, seed=1)
    model.fit(batches, epochs=10, shuffle=False)  # they are shuffled already; whole epochs: no steps_per_epoch

A batch is ({"source": ids and END, "target": BEGIN and ids}, ids of the target and END), int32, padded with 0.

It is a keras.utils.PyDataset that can be asked for some rows of a batch (docs/strategy.md, Data), and not tf.data: of
that a rank would read whole batches to keep its rows, and per-rank datasets would have other batches for another number
of ranks. Rows of a batch are padded alike, so the ranks, whose rows differ by at most one, have even shares of its
tokens; Strategy weighs each by its rows, or a masked loss by its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_ddl.data import chunk
from translation.lines import Ranks, ranges, read_range
from translation.plan import Plan
from translation.sentences import Sentences
from translation.subwords import BEGIN, END, PADDING, Subwords

Batch = tuple[dict[str, np.ndarray], np.ndarray]


class Batches(keras.utils.PyDataset):
    """See above. An epoch has each pair of sentences once, and all ranks take `len(batches)` steps.

    Attributes: plan: which sentences meet. epoch: the one whose batches are given, which `fit` moves on.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        subwords: Subwords,
        *,
        tokens: int = 4096,
        buckets: int = 8,
        longest: int = 128,
        seed: int = 0,
        shuffle: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        """Reads and cuts this rank's lines, and exchanges those that other ranks need. COLLECTIVE.

        Args:
            paths: the files of source and target, a sentence a line (lines.py).
            tokens: of the batch of all ranks: positions of source and target with padding.
            buckets: at most so many pairs of widths (plan.py).
            longest: pairs with more subwords on a side are left out, and so are those with an empty side.
            seed: of the orders of all epochs. shuffle: False for evaluation.
            ranks: who this process is; None: as keras_ddl says, so make batches after the Strategy.
        Raises:
            ValueError: files of unequal length, no pair to learn from, or batches too small for a pair or the ranks.
        Cost: at most 3/size of the files read (lines.py), 1/size held: 2 or 4 bytes a subword. Of all pairs, lengths
            and numbers are held, some 30 bytes each.
        """
        super().__init__()
        self.ranks = Ranks.of_job() if ranks is None else ranks
        total, texts = read_range(paths, self.ranks)
        first = ranges(total, self.ranks.size)[self.ranks.rank]
        mine = Sentences.encoded(first, texts, subwords)
        lengths = np.concatenate(self.ranks.all_gather(mine.lengths()))
        usable = (lengths > 0).all(axis=1) & (lengths <= longest).all(axis=1)
        # Each side has a mark more: END after the source, BEGIN before the target (or END after its labels).
        self.plan = Plan(
            np.where(usable[:, np.newaxis], lengths + 1, 0), tokens=tokens, buckets=buckets, seed=seed, shuffle=shuffle
        )
        rows = min(bucket.rows for bucket in self.plan.buckets)
        if rows < self.ranks.size:
            raise ValueError(
                "tokens: a batch must have a row for each rank, also where the sentences are long. Received: "
                f"tokens={tokens}, with {rows} row(s) for {self.ranks.size} ranks (rank {self.ranks.rank}). Raise "
                "tokens, lower `longest`, or use fewer buckets."
            )
        self._held = mine.exchanged(self.plan.needed(self.ranks.rank, self.ranks.size), self.ranks)
        self.epoch, self._began = 0, False
        self._order: tuple[int, list[Any]] = (-1, [])

    def __len__(self) -> int:
        return self.plan.steps

    def batch_rows(self, index: int) -> int:
        """Returns the rows of a batch of this epoch, of all ranks together."""
        return len(self._batch(index)[1])

    def rows(self, index: int, first: int, end: int) -> Batch:
        """Returns some rows of a batch of this epoch; those of another rank are not held (KeyError)."""
        bucket, sentences = self._batch(index)
        sentences, (source_width, target_width) = sentences[first:end], bucket.widths
        source = self._held.padded(sentences, 0, source_width)
        target = self._held.padded(sentences, 1, target_width)
        before = np.full([len(sentences), 1], BEGIN, np.int32)
        return {"source": _ended(source), "target": np.hstack([before, target[:, :-1]])}, _ended(target)

    def __getitem__(self, index: int) -> Batch:
        return self.rows(index, 0, self.batch_rows(index))

    def on_epoch_begin(self) -> None:
        """Keras calls it."""
        self._began = True

    def on_epoch_end(self) -> None:
        """Goes on to the next epoch's order. Keras calls it once before the first, too."""
        self.epoch += self._began
        self._began = False

    def remaining(self, position: dict[str, Any] | None = None) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yields this rank's rows of each batch to the end of an epoch, and the position after it: for one's own loops.

        The position is JSON and holds for any number of ranks: saved with the weights, it is where another run begins
        with the batches that are left. `fit` does not need it: callbacks.Checkpoint keeps its own.

        Args:
            position: None: the beginning.
        Raises: ValueError: it is one in other data, or of other settings.
        """
        position = position or {"epoch": 0, "batch": 0, "data": self.plan.digest}
        if position["data"] != self.plan.digest:
            raise ValueError(
                "A position must be one in the same data. Received: another corpus, subwords, tokens, buckets, "
                f"longest, seed or shuffle (rank {self.ranks.rank}). Give Batches what it was given then."
            )
        self.epoch, begin = position["epoch"], position["batch"]
        epoch = self.epoch
        for index in range(begin, len(self)):
            after = (epoch, index + 1) if index + 1 < len(self) else (epoch + 1, 0)
            share = chunk(self.batch_rows(index), self.ranks.rank, self.ranks.size)
            yield self.rows(index, *share), {"epoch": after[0], "batch": after[1], "data": self.plan.digest}

    def tokens(self, index: int) -> tuple[int, int]:
        """Returns a batch's subwords with marks, of source and target and all ranks, and the same with padding."""
        bucket, sentences = self._batch(index)
        return int(self.plan.lengths[sentences].sum()), len(sentences) * sum(bucket.widths)

    def summary(self) -> str:
        """Returns what there is to know before training, a line each."""
        real, padded = np.sum([self.tokens(index) for index in range(len(self))], axis=0)
        lines = [
            f"{len(self.plan.lengths) - self.plan.left_out:,} pairs of sentences, {self.plan.left_out:,} left out",
            f"{len(self):,} batches an epoch of {padded / len(self):,.0f} tokens, {1 - real / padded:.1%} are padding",
        ]
        for bucket in self.plan.buckets:
            source, target = bucket.widths
            shape = f"{bucket.rows:,} rows of {source} + {target}"
            lines.append(f"  {bucket.batches:,} batches of {shape}, {bucket.longer:,} of them with a row more")
        return "\n".join(lines)

    def _batch(self, index: int) -> Any:
        if self._order[0] != self.epoch:
            self._order = (self.epoch, self.plan.epoch(self.epoch))
        return self._order[1][index]


def _ended(ids: np.ndarray) -> np.ndarray:
    """Returns rows with END after their last id; each has padding there."""
    ended = ids.copy()
    ended[np.arange(len(ids)), (ids != PADDING).sum(axis=1)] = END
    return ended
