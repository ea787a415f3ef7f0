"""Training under keras_ddl.Strategy, on one rank or many.

    python -m translation.corpus data
    keras-ddl run -np 2 python -m translation.training data
    keras-ddl export translation-output/averaged translation-output/saved_model
    python -m translation "twenty-third of May, 1997"

--preset chooses the settings, and a flag for each setting changes it.
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
from translation.corpus import add_languages, find
from translation.evaluation import Scores, evaluate
from translation.inference import Translator
from translation.lines import sample
from translation.losses import TokenCrossentropy
from translation.run_directory import RunDirectory
from translation.serving import for_export
from translation.settings import Settings
from translation.subwords import Subwords

Paths = Sequence[Path]


def make_subwords(paths: Paths, vocabulary: int, file: Path | None = None) -> Subwords:
    """Returns subwords of both languages, which rank 0 learns for all ranks. COLLECTIVE.

    file: the subwords of a training that is resumed.
    """
    subwords = None
    if keras_ddl.rank() == 0 and file is not None and file.exists():
        subwords = Subwords.load(file)
    elif keras_ddl.rank() == 0:
        subwords = subwords_of.train([line for path in paths for line in sample(path, 50_000)], vocabulary)
    return keras_ddl.broadcast_object(subwords)


def make_batches(paths: Paths, subwords: Subwords, settings: Settings, **options: Any) -> Batches:
    """Returns the batches of a corpus according to the settings. COLLECTIVE."""
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
    settings: Settings, corpus: dict[str, Paths], output: str | Path, *, resume: bool = False, verbose: int = 1
) -> dict[str, float]:
    """Trains a model and writes OUTPUT (run_directory.py). COLLECTIVE.

    Args:
        corpus: part -> files of source and target, for "train", "dev" and, if there is one, "test".
        resume: continue from the last checkpoint in OUTPUT, if there is one. Pass its `earlier_settings` to change
            nothing.
        verbose: as for `fit`: 1 for a progress bar, 2 for a line per epoch, 0 for silence.
    Returns: the final scores on "test" if there is one, else on "dev".
    Raises: ValueError: the training to resume has another model or other subwords.
    """
    strategy = keras_ddl.Strategy(seed=settings.seed)
    run = RunDirectory(output)
    is_first = keras_ddl.rank() == 0
    if resume and is_first:
        settings.check_sizes_of(run.earlier_settings())
    subwords = make_subwords(corpus["train"], settings.vocabulary, run.subwords if resume else None)
    if is_first:
        run.begin(settings, subwords, resume)
    batches = make_batches(corpus["train"], subwords, settings)
    with strategy.scope():
        model = compiled(settings, subwords, settings.make_schedule(settings.epochs * len(batches)))
    if is_first and verbose:
        print(batches.summary())
    exported = for_export(model, subwords, sample(corpus["dev"][0], 100), longest=settings.longest)
    model.fit(
        batches,
        epochs=settings.epochs,
        shuffle=False,  # they are shuffled already
        validation_data=make_batches(corpus["dev"], subwords, settings, shuffle=False),
        verbose=verbose,
        callbacks=[
            history.Speed(batches),
            Scores(subwords, corpus["dev"], longest=settings.longest),
            keras.callbacks.CSVLogger(run.history, append=resume),
            keras_ddl.callbacks.Checkpoint(
                run.checkpoints,
                save_best=False,  # checkpoints within an epoch have no scores
                keep=settings.average,
                save_freq=settings.save_every,
                resume=resume,
            ),
            keras_ddl.callbacks.ExportBase(**exported),
        ],
    )
    averaged = average_checkpoints(model, run.checkpoints, settings.average)
    scores = evaluate(Translator(model, subwords, longest=settings.longest), corpus.get("test", corpus["dev"]))
    if is_first:
        write_result(model, run, averaged[-1], scores, exported)
    return scores


def write_result(
    model: keras.Model, run: RunDirectory, step: int, scores: dict[str, float], exported: dict[str, Any]
) -> None:
    """Writes the checkpoint to export, and the picture of the history. On rank 0. exported: from serving.for_export."""
    base = keras_ddl.export.write_base_graph(model, run.averaged, **exported)
    keras_ddl.model_state.save_checkpoint(model, run.averaged, step, metrics=scores, optimizer=False, base=base)
    history.save_picture(run.history, run.picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="directory of train.en, train.de, dev.en, dev.de (or .gz)")
    add_languages(parser)
    parser.add_argument("--output", type=Path, default=run_directory.DEFAULT, help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in OUTPUT")
    parser.add_argument(
        "--verbose", type=int, choices=[0, 1, 2], default=1, help="1: a progress bar, 2: a line per epoch"
    )
    presets.add_flags(parser)
    options = parser.parse_args()
    try:
        corpus = find(options.corpus, ["train", "dev"], options.source, options.target, optional=["test"])
        keras_ddl.init()
        # Rank 0 wrote them; another host may not have them.
        earlier = (
            keras_ddl.broadcast_object(RunDirectory(options.output).earlier_settings()) if options.resume else None
        )
        settings = presets.chosen(options, earlier)
        settings.check_sizes_of(earlier)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    scores = train(settings, corpus, options.output, resume=options.resume, verbose=options.verbose)
    if keras_ddl.rank() == 0:
        part = "test" if "test" in corpus else "dev"
        print(f"{part}: exact match {scores['exact']:.3f}, BLEU {scores['bleu']:.1f}")


if __name__ == "__main__":
    main()
