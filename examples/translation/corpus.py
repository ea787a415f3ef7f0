"""A parallel corpus that is made, not downloaded: true German for English phrases, in the layout of the WMT corpora.

    python -m translation.corpus DIRECTORY

writes train, dev and test, each as NAME.en and NAME.de, in UTF-8 with a sentence a line; line 7 of one is the
translation of line 7 of the other. A corpus of your own in that layout, plain or gzip (NAME.en.gz), takes its place.
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
    """Yields phrases (English, German) without end, the same for a seed. None comes twice, in either language, so that
    each has one right translation.
    """
    draw, seen = Random(seed), (set(), set())
    while True:
        pair = phrase(draw)
        if pair[0] not in seen[0] and pair[1] not in seen[1]:
            seen[0].add(pair[0])
            seen[1].add(pair[1])
            yield pair


def make(directory: str | Path, *, seed: int = 0, compress: bool = False, **sizes: int) -> dict[str, tuple[Path, Path]]:
    """Writes a corpus and returns its files by part, as (English, German). Files that are there are replaced.

    No phrase of dev or test, in either language, is in train; all are of one distribution. Half a second of a core for
    10,000 phrases. On several ranks: on rank 0 only, and then a barrier.

    Args:
        compress: gzip, with the ending .gz.
        sizes: phrases of a part, where they shall differ from SIZES: `train=1000`.
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

    Args: optional: parts that are left out where they are not there.
    Raises: FileNotFoundError: a file is missing; names it.
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
                "A corpus is two files of each part, a sentence a line, plain or .gz. Received: no "
                f"{missing[0]}. {remedy}"
            )
    return found


def add_languages(parser: argparse.ArgumentParser) -> None:
    """Adds the endings of the files of a corpus."""
    parser.add_argument("--source", default="en", help="ending of the files to translate (%(default)s)")
    parser.add_argument("--target", default="de", help="ending of their translations (%(default)s)")


def _write(path: Path, lines: list[str], compress: bool) -> Path:
    path = path.with_name(path.name + ".gz") if compress else path
    text = "".join(line + "\n" for line in lines).encode()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(gzip.compress(text, mtime=0) if compress else text)  # no time: the same bytes each time
    unfinished.replace(path)
    return path


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    for part, size in SIZES.items():
        parser.add_argument(f"--{part}", type=int, default=size, help=f"phrases (default: {size:,})")
    chosen = parser.parse_args()
    there = [path for part in SIZES for path in sorted(chosen.directory.glob(f"{part}.*"))]
    if there and not chosen.force:
        parser.error(f"DIRECTORY must hold no corpus yet. Received: {there[0]}. Choose another one, or give --force.")
    sizes = {part: getattr(chosen, part) for part in SIZES}
    for files in make(chosen.directory, seed=chosen.seed, compress=chosen.gzip, **sizes).values():
        print(*files)


if __name__ == "__main__":
    main()
