"""Translates with the exported model of a training.

    python -m translation "twenty-third of May, 1997" "the third of June"
    python -m translation < sentences.txt

Writes a line for each phrase. Without a phrase it reads lines from standard input. It only needs TensorFlow, because
the SavedModel contains everything else.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from translation import DEFAULT_OUTPUT

_LINES = 64  # at once


def newest_export(output: Path) -> Path:
    """Returns the highest version in OUTPUT/saved_model. Raises: FileNotFoundError: there is none."""
    folder = output / "saved_model"
    versions = [each for each in folder.glob("*/") if each.name.isdecimal()]
    if versions:
        return max(versions, key=lambda each: int(each.name))
    steps = [f"keras-ddl export {output}/averaged {folder}"]
    if not (output / "averaged").exists():
        steps = ["python -m translation.corpus data", f"python -m translation.training data --output {output}", *steps]
    raise FileNotFoundError(
        f"{folder} holds what a training has exported, as numbered versions. Received: none. Make one:\n  "
        + "\n  ".join(steps)
    )


def load(version: Path) -> Callable[[list[str]], dict[str, Any]]:
    """Returns a function of sentences, which answers `translation` and `score`.

    Raises: ValueError: the SavedModel does not translate.
    """
    # Without TensorFlow's messages at startup, and without Keras, whose import would take half of the startup time.
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"})
    sys.modules.setdefault("keras", None)
    import tensorflow as tf

    model = tf.saved_model.load(str(version))
    if "translate" not in model.signatures:
        raise ValueError(
            f"A model that translates has the signature 'translate' (serving.py). Received: {version}, with "
            f"{sorted(model.signatures)}. Export one that translation.training has trained."
        )

    def ask(sentences: list[str]) -> dict[str, Any]:
        try:
            answers = model.signatures["translate"](text=tf.constant(sentences))
        except tf.errors.InvalidArgumentError as error:
            said = re.search(r"assertion failed: \[(.*)\] \[(\d+)\]", error.message)  # by serving.py
            raise ValueError(f"{said[1]} {said[2]}." if said else error.message) from None
        return {name: tensor.numpy() for name, tensor in answers.items()}

    return ask


def batches(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yields up to `size` lines at a time, in the Unicode form of the corpus and without line breaks."""
    lines = iter(lines)
    while chosen := [unicodedata.normalize("NFC", line.strip()) for line in islice(lines, size)]:
        yield chosen


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m translation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phrases", nargs="*", metavar="PHRASE")
    parser.add_argument(
        "--output", type=Path, default=Path(DEFAULT_OUTPUT), help="directory of the training (%(default)s)"
    )
    parser.add_argument("--scores", action="store_true", help="print a score and a tab before each line; 0 is certain")
    options = parser.parse_args()
    lines = options.phrases or sys.stdin
    size = 1 if lines is sys.stdin and sys.stdin.isatty() else _LINES
    try:
        ask = load(newest_export(options.output))
        for sentences in batches(lines, size):
            answers = ask(sentences)
            for text, score in zip(answers["translation"], answers["score"]):
                print(f"{score:.3f}\t{text.decode()}" if options.scores else text.decode(), flush=size == 1)
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
