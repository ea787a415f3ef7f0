"""Evaluation: each rank translates its share of the held-out sentences, and the translations are scored.

    python -m translation.evaluation data
    keras-ddl run -np 2 python -m translation.evaluation data --part dev --beam 1 --write translations.txt

It evaluates the training in translation-output, or in --output.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

import keras_ddl
from translation import scores
from translation.corpus import add_languages, find
from translation.inference import Translator
from translation.lines import Ranks, read_lines
from translation.run_directory import DEFAULT, RunDirectory


def translations(translator: Translator, sentences: Sequence[str], ranks: Ranks) -> list[str]:
    """Returns the translations of all sentences, on all ranks; each computes its share. COLLECTIVE."""
    share = translator(sentences[ranks.rank :: ranks.size])
    answers = [""] * len(sentences)
    for rank, given in enumerate(ranks.all_gather(share)):
        answers[rank :: ranks.size] = given
    return answers


def evaluate(translator: Translator, paths: Sequence[str | Path], *, limit: int | None = None) -> dict[str, float]:
    """Returns {"exact": share of translations that are right to the letter, "bleu": 0 to 100}. COLLECTIVE.

    Args: paths: files of source and of references. limit: evaluate only the first `limit` sentences.
    """
    source, references = (read_lines(path)[:limit] for path in paths)
    found = translations(translator, source, Ranks.current())
    return {"exact": scores.exact_match(found, references), "bleu": scores.bleu(found, references)}


class Scores(keras.callbacks.Callback):
    """Puts `exact` and `bleu` of held-out sentences into each epoch's logs. Put it before callbacks that read logs.

    It decodes greedily, which is quicker than beam search and shows the progress of training as well.
    """

    never_stops_within_epoch = True  # so that the ranks need not agree in every batch

    def __init__(self, subwords: Any, paths: Sequence[str | Path], limit: int = 200, longest: int = 128) -> None:
        super().__init__()
        self.subwords, self.paths, self.limit, self.longest = subwords, paths, limit, longest
        self._translator: Translator | None = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._translator is None:
            self._translator = Translator(self.model, self.subwords, beam=1, longest=self.longest)
        logs.update(evaluate(self._translator, self.paths, limit=self.limit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="directory of dev.en and dev.de, test.en and test.de (or .gz)")
    add_languages(parser)
    parser.add_argument("--output", type=Path, default=DEFAULT, help="directory of the training (%(default)s)")
    parser.add_argument("--part", default="test", choices=["dev", "test"], help="(%(default)s)")
    parser.add_argument("--beam", type=int, default=4, help="hypotheses per sentence; 1 is greedy (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the translations to FILE, one per line")
    options = parser.parse_args()
    try:
        source, references = find(options.corpus, [options.part], options.source, options.target)[options.part]
        keras_ddl.Strategy()  # this rank's device and its share of the cores
        model, subwords, settings = RunDirectory(options.output).load_on_all_ranks()
    except FileNotFoundError as error:
        parser.error(str(error))
    translator = Translator(model, subwords, beam=options.beam, longest=settings.longest)
    found = translations(translator, read_lines(source), Ranks.current())
    if keras_ddl.rank() == 0:
        right = read_lines(references)
        print(
            f"{options.part}: exact match {scores.exact_match(found, right):.3f}, BLEU {scores.bleu(found, right):.1f}"
        )
        if options.write is not None:
            options.write.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")


if __name__ == "__main__":
    main()
