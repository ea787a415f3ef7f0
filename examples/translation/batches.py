"""Batches of a given number of tokens for any Keras model. One process and many ranks train on the same batches.

    strategy = keras_ddl.Strategy(seed=1)
    batches = Batches(("data/train.en", "data/train.de"), subwords, tokens=4096, seed=1)
    model.fit(batches, epochs=10, shuffle=False)  # they are shuffled already; whole epochs: no steps_per_epoch

A batch is ({"source": ids and END, "target": BEGIN and ids}, ids of the target and END), int32, padded with 0.

`Batches` is a keras.utils.PyDataset that returns some rows of a batch (docs/strategy.md, Data). With tf.data a rank
would read whole batches to keep its rows, and with per-rank datasets the batches would depend on the number of ranks.
All rows of a batch have the same width, and the ranks' rows differ by at most one, so the ranks share the tokens of a
batch evenly. Strategy weighs a rank by its rows, or by its tokens with a masked loss.
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
    """An epoch has each pair of sentences once, and all ranks take `len(batches)` steps.

    Attributes: plan: which sentences share a batch. epoch: the current epoch, which `fit` increments.
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
        """Reads and cuts this rank's lines, and exchanges lines that other ranks need. COLLECTIVE.

        Args:
            paths: the files of source and target, one sentence per line (lines.py).
            tokens: positions in a batch of all ranks: source and target with padding.
            buckets: the largest number of pairs of widths (plan.py).
            longest: pairs with more subwords on a side are left out, and so are pairs with an empty side.
            seed: seed of the order of each epoch. shuffle: False for evaluation.
            ranks: this process's rank; None: keras_ddl's, so make batches after the Strategy.
        Raises:
            ValueError: files of unequal length, no pair to learn from, or batches too small for a pair or the ranks.
        Cost: reads at most 3/size of the files (lines.py), and keeps 1/size, with 2 or 4 bytes per subword. Keeps the
            lengths and numbers of all pairs, some 30 bytes each.
        """
        super().__init__()
        self.ranks = Ranks.current() if ranks is None else ranks
        total, texts = read_range(paths, self.ranks)
        first = ranges(total, self.ranks.size)[self.ranks.rank]
        mine = Sentences.encoded(first, texts, subwords)
        lengths = np.concatenate(self.ranks.all_gather(mine.lengths()))
        usable = (lengths > 0).all(axis=1) & (lengths <= longest).all(axis=1)
        # Each side has one more mark: END after the source, BEGIN before the target (or END after its labels).
        self.plan = Plan(
            np.where(usable[:, np.newaxis], lengths + 1, 0), tokens=tokens, buckets=buckets, seed=seed, shuffle=shuffle
        )
        rows = min(bucket.rows for bucket in self.plan.buckets)
        if rows < self.ranks.size:
            raise ValueError(
                "tokens: a batch must have a row for each rank, even if its sentences are long. Received: "
                f"tokens={tokens}, with {rows} row(s) for {self.ranks.size} ranks (rank {self.ranks.rank}). Raise "
                "tokens, lower `longest`, or use fewer buckets."
            )
        self._held = mine.exchanged(self.plan.needed(self.ranks.rank, self.ranks.size), self.ranks)
        self.epoch, self._began = 0, False
        self._order: tuple[int, list[Any]] = (-1, [])

    def __len__(self) -> int:
        return self.plan.steps

    def batch_rows(self, index: int) -> int:
        """Returns the number of rows of a batch of this epoch, on all ranks together."""
        return len(self._batch(index)[1])

    def rows(self, index: int, first: int, end: int) -> Batch:
        """Returns some of this rank's rows of a batch of this epoch. Raises: KeyError: other ranks' rows."""
        bucket, sentences = self._batch(index)
        sentences, (source_width, target_width) = sentences[first:end], bucket.widths
        source = self._held.padded(sentences, 0, source_width)
        target = self._held.padded(sentences, 1, target_width)
        before = np.full([len(sentences), 1], BEGIN, np.int32)
        return {"source": _ended(source), "target": np.hstack([before, target[:, :-1]])}, _ended(target)

    def __getitem__(self, index: int) -> Batch:
        return self.rows(index, 0, self.batch_rows(index))

    def on_epoch_begin(self) -> None:
        self._began = True

    def on_epoch_end(self) -> None:
        """Moves on to the next epoch's order. Keras also calls it once before the first epoch."""
        self.epoch += self._began
        self._began = False

    def remaining(self, position: dict[str, Any] | None = None) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yields this rank's rows of each remaining batch of an epoch, with the position after it, for custom loops.

        The position is JSON and is valid for any number of ranks. Save it with the weights, so that another run can
        continue with the remaining batches. `fit` does not need it, because callbacks.Checkpoint saves its own.

        Args:
            position: None: the beginning.
        Raises: ValueError: the position belongs to other data or other settings.
        """
        position = position or {"epoch": 0, "batch": 0, "data": self.plan.digest}
        if position["data"] != self.plan.digest:
            raise ValueError(
                "A position must belong to the same data. Received: another corpus, subwords, tokens, buckets, "
                f"longest, seed or shuffle (rank {self.ranks.rank}). Make Batches with the same arguments as then."
            )
        self.epoch, begin = position["epoch"], position["batch"]
        epoch = self.epoch
        for index in range(begin, len(self)):
            after = (epoch, index + 1) if index + 1 < len(self) else (epoch + 1, 0)
            share = chunk(self.batch_rows(index), self.ranks.rank, self.ranks.size)
            yield self.rows(index, *share), {"epoch": after[0], "batch": after[1], "data": self.plan.digest}

    def tokens(self, index: int) -> tuple[int, int]:
        """Returns the subwords and marks in a batch, of source and target on all ranks, without and with padding."""
        bucket, sentences = self._batch(index)
        return int(self.plan.lengths[sentences].sum()), len(sentences) * sum(bucket.widths)

    def summary(self) -> str:
        """Returns a summary of the batches, to print before training."""
        real, padded = np.sum([self.tokens(index) for index in range(len(self))], axis=0)
        lines = [
            f"{len(self.plan.lengths) - self.plan.left_out:,} pairs of sentences, {self.plan.left_out:,} left out",
            f"{len(self):,} batches an epoch of {padded / len(self):,.0f} tokens, {1 - real / padded:.1%} are padding",
        ]
        for bucket in self.plan.buckets:
            source, target = bucket.widths
            shape = f"{bucket.rows:,} rows of {source} + {target}"
            lines.append(f"  {bucket.batches:,} batches of {shape}, {bucket.longer:,} of them with one more row")
        return "\n".join(lines)

    def _batch(self, index: int) -> Any:
        if self._order[0] != self.epoch:
            self._order = (self.epoch, self.plan.epoch(self.epoch))
        return self._order[1][index]


def _ended(ids: np.ndarray) -> np.ndarray:
    """Returns rows with END after their last id, where each row has padding."""
    ended = ids.copy()
    ended[np.arange(len(ids)), (ids != PADDING).sum(axis=1)] = END
    return ended
