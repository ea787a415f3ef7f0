"""Training under keras_ddl.Strategy, on one rank or many.

python -m translation.corpus data
keras-ddl run -np 2 python -m translation.training data
keras-ddl export translation-output/averaged translation-output/saved_model
python -m translation "twenty-third of May, 1997"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

import keras_ddl
from translation import history, run_directory
from translation import settings as presets
from translation import subwords as subwords_of
from translation.averaging import average_checkpoints
from translation.batches import Batches
from translation.evaluation import Scores, evaluate
from translation.inference import Translator
from translation.lines import sample
from translation.losses import TokenCrossentropy
from translation.run_directory import RunDirectory
from translation.serving import for_export
from translation.settings import Settings
from translation.subwords import Subwords

Paths = Sequence[Path]


def make_subwords(paths: Paths, vocabulary: int) -> Subwords:
    """Returns subwords of both languages, learned on rank 0, the same on all ranks. COLLECTIVE."""
    cut = None
    if keras_ddl.rank() == 0:
        cut = subwords_of.train([line for path in paths for line in sample(path, 50_000)], vocabulary)
    return keras_ddl.broadcast_object(cut)


def make_batches(paths: Paths, subwords: Subwords, settings: Settings, **options: Any) -> Batches:
    """Returns the batches of a corpus as the settings have them. COLLECTIVE."""
    return Batches(
        paths,
        subwords,
        tokens=settings.tokens,
        buckets=settings.buckets,
        longest=settings.longest,
        seed=settings.seed,
        **options,
    )


def compiled(settings: Settings, subwords: Subwords, rate: Any) -> keras.Model:
    """Returns a new model, built and compiled. Call it in the scope of a Strategy. rate: a number or a schedule."""
    model = run_directory.build(settings, subwords)
    model.compile(settings.make_optimizer(rate), TokenCrossentropy(settings.smoothing))
    return model


def train(
    settings: Settings, corpus: dict[str, Paths], output: str | Path, *, resume: bool = False
) -> dict[str, float]:
    """Trains a model and writes OUTPUT (run_directory.py). COLLECTIVE.

    Args:
        corpus: "train" and "dev": their files of source and target; "test", if there is one, is scored in the end.
        resume: go on from the last checkpoint in OUTPUT, if there is one.
    Returns: the scores in the end, of "test" if there is one, of "dev" otherwise.
    """
    strategy = keras_ddl.Strategy(seed=settings.seed)
    run = RunDirectory(output)
    is_first = keras_ddl.rank() == 0
    subwords = make_subwords(corpus["train"], settings.vocabulary)
    if is_first:
        run.begin(settings, subwords, resume)
    batches = make_batches(corpus["train"], subwords, settings)
    with strategy.scope():
        model = compiled(settings, subwords, settings.make_schedule(settings.epochs * len(batches)))
    model.fit(
        batches,
        epochs=settings.epochs,
        shuffle=False,  # they are shuffled already
        validation_data=make_batches(corpus["dev"], subwords, settings, shuffle=False),
        callbacks=[
            history.Speed(batches),
            Scores(subwords, corpus["dev"]),
            keras.callbacks.CSVLogger(run.history, append=resume),
            keras_ddl.callbacks.Checkpoint(
                run.checkpoints,
                save_best=False,  # within an epoch none has scores
                keep=settings.average,
                save_freq=settings.save_every,
                resume=resume,
            ),
        ],
    )
    averaged = average_checkpoints(model, run.checkpoints, settings.average)
    scores = evaluate(Translator(model, subwords), corpus.get("test", corpus["dev"]))
    if is_first:
        exported = for_export(model, subwords, sample(corpus["dev"][0], 4), longest=settings.longest)
        write_result(model, run, averaged[-1], scores, exported)
    return scores


def write_result(
    model: keras.Model, run: RunDirectory, step: int, scores: dict[str, float], exported: dict[str, Any]
) -> None:
    """Writes what is exported, and the curve. On rank 0. exported: of serving.for_export."""
    base = keras_ddl.export.write_base_graph(model, run.averaged, **exported)
    keras_ddl.model_state.save_checkpoint(model, run.averaged, step, metrics=scores, optimizer=False, base=base)
    history.save_picture(run.history, run.picture)


def find_corpus(directory: str | Path, source: str = "en", target: str = "de") -> dict[str, Paths]:
    """Returns the files of a directory by part: train, dev and, if it is there, test, as PART.en and PART.de or .gz.

    Raises: FileNotFoundError: a file is missing; names it.
    """
    found = {}
    for part in ("train", "dev", "test"):
        plain = [Path(directory) / f"{part}.{language}" for language in (source, target)]
        paths = [path if path.exists() else path.with_name(path.name + ".gz") for path in plain]
        missing = [str(path) for path, there in zip(plain, paths) if not there.exists()]
        if not missing:
            found[part] = paths
        elif part != "test":
            raise FileNotFoundError(
                f"A corpus is two files of each part, a sentence a line, plain or .gz. Received: no {missing[0]}. "
                f"Make one: python -m translation.corpus {directory}"
            )
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="directory of train.en, train.de, dev.en, dev.de (or .gz)")
    parser.add_argument("--source", default="en", help="ending of the files to translate (en)")
    parser.add_argument("--target", default="de", help="ending of their translations (de)")
    parser.add_argument("--output", type=Path, default=run_directory.DEFAULT, help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in OUTPUT")
    presets.add_flags(parser)
    options = parser.parse_args()
    try:
        corpus = find_corpus(options.corpus, options.source, options.target)
    except FileNotFoundError as error:
        parser.error(str(error))
    scores = train(presets.chosen(options), corpus, options.output, resume=options.resume)
    if keras_ddl.rank() == 0:
        part = "test" if "test" in corpus else "dev"
        print(f"{part}: exact match {scores['exact']:.3f}, BLEU {scores['bleu']:.1f}")


if __name__ == "__main__":
    main()
