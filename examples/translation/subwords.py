"""One vocabulary of subwords for both languages: byte-pair encoding (Sennrich et al., ACL 2016) by sentencepiece.

With one vocabulary, models can share one table between encoder, decoder and output. With byte pairs, the rule that cuts
a text is short enough for a graph of plain TensorFlow operations: see `Subwords.pieces`. For the same reason text is
not normalised; give it in one Unicode form (NFC).
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

PADDING, UNKNOWN, BEGIN, END = range(4)


class Subwords:
    """Cuts sentences into subwords, as ids, and joins them again.

    `train` makes it, or `load` from a file that `save` wrote. It can be pickled for keras_ddl.broadcast_object.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def __reduce__(self) -> tuple:
        return Subwords, (self.model,)

    def __len__(self) -> int:
        """The number of ids, including padding, unknown, begin and end, and so the rows of an embedding table."""
        return len(self._processor)

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each sentence, without begin and end."""
        return self._processor.encode(list(sentences))

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """Returns the sentences of rows of ids; each ends at its first END, and padding and BEGIN are left out."""
        rows = []
        for row in ids:
            row = [int(one) for one in row]
            row = row[: row.index(END)] if END in row else row
            rows.append([one for one in row if one not in (PADDING, BEGIN)])
        return self._processor.decode(rows) if rows else []  # sentencepiece turns no rows into one empty sentence

    @functools.cached_property
    def pieces(self) -> list[tuple[str, float]]:
        """Each id's piece and score, which are enough to implement the rule in a graph:

        Put "▁" (U+2581) before the sentence and in place of each space, and begin with single characters. While joining
        some two neighbours gives a piece (id 4 or more), join the pair with the highest score, or the leftmost of
        several. Characters that are then in no piece are UNKNOWN, and several UNKNOWN in a row become one.
        """
        processor = self._processor
        return [(processor.id_to_piece(one), processor.get_score(one)) for one in range(len(processor))]

    def save(self, path: str | Path) -> None:
        """Writes sentencepiece's own format, which its other tools read."""
        Path(path).write_bytes(self.model)

    @classmethod
    def load(cls, path: str | Path) -> Subwords:
        """Returns what `save` wrote."""
        return cls(Path(path).read_bytes())


def train(sentences: Iterable[str], vocabulary: int = 500) -> Subwords:
    """Returns subwords learned from sentences of both languages, the same for the same sentences.

    On several ranks, once:

        subwords = train(sample(...)) if keras_ddl.rank() == 0 else None
        subwords = keras_ddl.broadcast_object(subwords)

    Args:
        vocabulary: total number of ids; there are fewer if the sentences do not have as many different pairs. Each
            digit is a separate subword.
    Raises: ValueError: the vocabulary is too small for all the characters.
    """
    sentences = list(sentences)
    characters = len(set().union(*sentences, "▁") - {" "}) + END + 1
    if vocabulary < characters:
        raise ValueError(
            f"vocabulary: each character of the text needs an id, and there are {END + 1} marks. Received: "
            f"vocabulary={vocabulary}, and a text that needs {characters}. Raise it (--vocabulary)."
        )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        hard_vocab_limit=False,
        character_coverage=1.0,
        split_digits=True,
        normalization_rule_name="identity",
        pad_id=PADDING,
        unk_id=UNKNOWN,
        bos_id=BEGIN,
        eos_id=END,
        num_threads=1,
        minloglevel=2,
    )
    return Subwords(model.getvalue())
