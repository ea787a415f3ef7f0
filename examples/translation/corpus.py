"""Makes a parallel corpus of English phrases and correct German, in the layout of the WMT corpora, without a download.

    python -m translation.corpus DIRECTORY

writes train, dev and test, each as NAME.en and NAME.de, in UTF-8 with one sentence per line. Line 7 of one file is the
translation of line 7 of the other. You can use your own corpus in that layout instead, plain or gzip (NAME.en.gz).
"""

from __future__ import annotations

import argparse
import gzip
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from translation.phrases import Pair, phrase

SIZES = {"dev": 1_000, "test": 1_000, "train": 60_000}
LANGUAGES = ("en", "de")


def pairs(seed: int = 0) -> Iterator[Pair]:
    """Yields (English, German) phrases without end, the same for the same seed.

    No phrase comes twice in either language, so that each phrase has one right translation.
    """
    draw, seen = Random(seed), (set(), set())
    while True:
        pair = phrase(draw)
        if pair[0] not in seen[0] and pair[1] not in seen[1]:
            seen[0].add(pair[0])
            seen[1].add(pair[1])
            yield pair


def make(directory: str | Path, *, seed: int = 0, compress: bool = False, **sizes: int) -> dict[str, tuple[Path, Path]]:
    """Writes a corpus and returns part -> (English file, German file). Replaces existing files.

    No phrase of dev or test, in either language, is in train; all parts have one distribution. On several ranks, call
    it on rank 0 only, followed by a barrier.

    Args:
        compress: write gzip files that end in .gz.
        sizes: part -> number of phrases, if it differs from SIZES: `train=1000`.
    Cost: half a second of a core for 10,000 phrases.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    source, made = pairs(seed), {}
    for part, size in (SIZES | sizes).items():
        both = [next(source) for _ in range(size)]
        made[part] = tuple(
            _write(directory / f"{part}.{language}", [pair[place] for pair in both], compress)
            for place, language in enumerate(LANGUAGES)
        )
    return made


def find(
    directory: str | Path, parts: Sequence[str], source: str = "en", target: str = "de", optional: Sequence[str] = ()
) -> dict[str, list[Path]]:
    """Returns the files of a corpus by part, [source, target], as PART.en and PART.de or with .gz.

    Args: optional: parts that may be missing.
    Raises: FileNotFoundError: a file is missing; the message names it.
    """
    found = {}
    for part in [*parts, *optional]:
        plain = [Path(directory) / f"{part}.{language}" for language in (source, target)]
        paths = [path if path.exists() else path.with_name(path.name + ".gz") for path in plain]
        missing = [path for path, there in zip(plain, paths) if not there.exists()]
        if not missing:
            found[part] = paths
        elif part in parts:
            remedy = f"Make one: python -m translation.corpus {directory}"
            if len(missing) < 2 or list(Path(directory).glob("train.*")):
                remedy = "Name its languages with --source and --target."
            raise FileNotFoundError(
                "A corpus must have two files for each part, one sentence per line, plain or .gz. Received: no "
                f"{missing[0]}. {remedy}"
            )
    return found


def add_languages(parser: argparse.ArgumentParser) -> None:
    """Adds options for the endings of a corpus's files."""
    parser.add_argument("--source", default="en", help="ending of the files to translate (%(default)s)")
    parser.add_argument("--target", default="de", help="ending of their translations (%(default)s)")


def _write(path: Path, lines: list[str], compress: bool) -> Path:
    path = path.with_name(path.name + ".gz") if compress else path
    text = "".join(line + "\n" for line in lines).encode()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(gzip.compress(text, mtime=0) if compress else text)  # no time, for the same bytes each time
    unfinished.replace(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    for part, size in SIZES.items():
        parser.add_argument(f"--{part}", type=int, default=size, help=f"phrases (default: {size:,})")
    chosen = parser.parse_args()
    there = [path for part in SIZES for path in sorted(chosen.directory.glob(f"{part}.*"))]
    if there and not chosen.force:
        parser.error(f"DIRECTORY must not have a corpus yet. Received: {there[0]}. Choose another one, or use --force.")
    sizes = {part: getattr(chosen, part) for part in SIZES}
    for files in make(chosen.directory, seed=chosen.seed, compress=chosen.gzip, **sizes).values():
        print(*files)


if __name__ == "__main__":
    main()
