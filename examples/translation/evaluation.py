"""Evaluation: held-out sentences translated by all ranks, each its share, and scored.

python -m translation.evaluation --output translation-output --corpus data --part test
keras-ddl run -np 2 python -m translation.evaluation
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from translation import scores
from translation.inference import Translator
from translation.lines import Ranks


def translations(translator: Translator, sentences: Sequence[str], ranks: Ranks) -> list[str]:
    """Returns the translations of all sentences, on all ranks; each computes its share. COLLECTIVE."""
    share = translator(sentences[ranks.rank :: ranks.size])
    answers = [""] * len(sentences)
    for rank, given in enumerate(ranks.all_gather(share)):
        answers[rank :: ranks.size] = given
    return answers


def evaluate(translator: Translator, paths: Sequence[str | Path], *, limit: int | None = None) -> dict[str, float]:
    """Returns {"exact": share of translations that are right to the letter, "bleu": 0 to 100}. COLLECTIVE.

    Args: paths: files of source and of references. limit: sentences, of which it takes the first.
    """
    source, references = (_read(path)[:limit] for path in paths)
    found = translations(translator, source, Ranks.of_job())
    return {"exact": scores.exact_match(found, references), "bleu": scores.bleu(found, references)}


class Scores(keras.callbacks.Callback):
    """Puts `exact` and `bleu` of some held-out sentences into the logs of each epoch. Put it before what reads logs.

    Greedy decoding: it is quicker than beam search, and tells as much about where training stands.
    """

    never_stops_within_epoch = True  # spares the ranks an agreement in every batch

    def __init__(self, subwords: Any, paths: Sequence[str | Path], limit: int = 200) -> None:
        super().__init__()
        self.subwords, self.paths, self.limit = subwords, paths, limit
        self._translator: Translator | None = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._translator is None:
            self._translator = Translator(self.model, self.subwords, beam=1)
        logs.update(evaluate(self._translator, self.paths, limit=self.limit))


def _read(path: str | Path) -> list[str]:
    import gzip

    path = Path(path)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return [line.strip() for line in file]
