"""Scores translations: exact match and BLEU."""

from __future__ import annotations

from collections.abc import Sequence


def exact_match(translations: Sequence[str], references: Sequence[str]) -> float:
    """Returns the share of translations that equal their reference to the letter."""
    return sum(one == other for one, other in zip(translations, references, strict=True)) / len(references)


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Returns the BLEU of the corpus, 0 to 100, as sacrebleu computes it (Post 2018, arXiv 1804.08771)."""
    import sacrebleu

    return sacrebleu.corpus_bleu(list(translations), [list(references)]).score
