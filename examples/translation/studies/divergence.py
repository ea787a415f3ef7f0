"""Learning rates and batch sizes at which a Transformer diverges, with and without warm-up, and with the guard.

    python -m translation.studies.divergence

Many ranks make large batches, which need high rates. The first Transformer used warm-up (Vaswani et al. 2017, arXiv
1706.03762). Without it, the training perplexity of a Transformer for German and English was above 500, instead of 10
(Liu et al. 2020, arXiv 1908.03265, figure 1). It matters most if the sum after each sublayer is normalised (Xiong et
al. 2020, arXiv 2002.04745).

This command measures a small Transformer of that kind, with Adam at a constant rate. For several rates and batch sizes
it trains without warm-up, with warm-up, and without warm-up but with keras_ddl.callbacks.DivergenceGuard, which either
stops, or returns to the last good state and continues at a lower rate. All trainings begin with the same weights and
see the same data.

The end of a training is the mean loss of the last tenth of its steps. The training has diverged if its end is

    not finite    NaN or infinite,
    blind         not 2 % below the loss of guesses by the subwords' frequencies alone, or
    risen         more than 20 % above the mean of an earlier tenth.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

import keras_ddl
from translation import corpus
from translation.settings import Settings
from translation.studies import diverging
from translation.studies import rows as rows_of
from translation.studies.diverging import BLIND, Plan, Training
from translation.studies.rows import Row

SMALL = Settings(
    width=64,
    heads=4,
    inner=256,
    layers=2,
    normalize="after",
    dropout=0.0,
    vocabulary=300,
    buckets=1,  # each shape of batches costs seconds before its first step
    longest=24,
    smoothing=0.0,
)
FLAGS = ("width", "heads", "inner", "layers", "normalize", "dropout", "vocabulary", "longest", "seed")
RISEN = 1.2
LOOKS = {  # until it stops, STOP has the same line as WITHOUT, so its line is broad and below the other
    diverging.WITHOUT: {"color": "tab:red", "linewidth": 1},
    diverging.WITH: {"color": "tab:blue", "linewidth": 1},
    diverging.STOP: {"color": "tab:orange", "linewidth": 5, "alpha": 0.5, "zorder": 1},
    diverging.BACK: {"color": "tab:green", "linewidth": 1},
}


def ends(losses: Sequence[float], steps: int) -> np.ndarray:
    """Returns the mean losses of tenths of `steps`; the last tenth ends with the last loss."""
    tenth = max(steps // 10, 1)
    tenths = [losses[max(end - tenth, 0) : end] for end in range(len(losses), 0, -tenth)]
    return np.array([np.mean(each) for each in reversed(tenths)])


def diverged(losses: Sequence[float], steps: int, blind: float) -> str:
    """Returns the rule by which a training has diverged; "" if it has not diverged.

    Args:
        losses: the loss of each step made. steps: the number of planned steps. blind: the loss of blind guesses.
    """
    if not np.isfinite(losses).all():
        return "not finite"
    means = ends(losses, steps)
    if means[-1] > BLIND * blind:
        return "blind"
    return "risen" if means[-1] > RISEN * means.min() else ""


def row(training: Training, steps: int) -> Row:
    """Returns a row of the study."""
    acts = []
    for made, said in training.acts:
        rate = training.rates[made] if made < len(training.rates) else None
        on = "goes back" if rate is None else f"on at {rate:g}"  # None: there was no later step
        acts.append(f"{made}: stops" if "Training stops" in said else f"{made}: {on}")
    return {
        "tokens": training.tokens,
        "rate": f"{training.rate:g}",
        "what": training.way,
        "steps": len(training.losses),
        "loss in the end": float(ends(training.losses, steps)[-1]),
        "blind guesses": training.blind,
        "diverged": diverged(training.losses, steps, training.blind),
        "guard, after steps": "; ".join(acts),
        "how": "measured",
    }


def draw(trainings: Sequence[Training], figure: Any, found: Sequence[Row]) -> None:
    """Draws the loss over the steps: a line for each way, rates from left to right, batches from top to bottom."""
    rates = sorted({each.rate for each in trainings})
    sizes = sorted({each.tokens for each in trainings})
    grid = figure.subplots(len(sizes), len(rates), sharex=True, sharey=True, squeeze=False)
    for training in trainings:
        axes = grid[sizes.index(training.tokens), rates.index(training.rate)]
        look = LOOKS[training.way]
        axes.plot(range(1, len(training.losses) + 1), training.losses, label=training.way, **look)
        for made, said in training.acts:
            marker = "x" if "Training stops" in said else "v"
            axes.plot(made, training.losses[made - 1], color=look["color"], marker=marker, linestyle="none")
        axes.axhline(training.blind, color="black", linewidth=0.5, linestyle=":")
        axes.grid(alpha=0.3)
    for axes, rate in zip(grid[0], rates):
        axes.set_title(f"rate {rate:g}", fontsize="medium")
    for axes, tokens in zip(grid[:, 0], sizes):
        axes.set_ylabel(f"{tokens:,} tokens a step:\nloss, nats a token")
    for axes in grid[-1]:
        axes.set_xlabel("steps made")
    first = np.nanmax([each.losses[0] for each in trainings])
    grid[0, 0].set_ylim(0, 1.2 * first)
    lines = [line for line in grid[0, 0].get_lines() if line.get_label() in LOOKS]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        parents=[rows_of.options("divergence")],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--corpus", help="directory of train.en and train.de (default: make one)")
    corpus.add_languages(parser)
    for field in dataclasses.fields(Plan):
        several = isinstance(field.default, tuple)
        kind = type(field.default[0] if several else field.default)
        shown = " ".join(map(str, field.default)) if several else field.default
        parser.add_argument(
            f"--{field.name}", type=kind, nargs="+" if several else None, default=field.default, help=f"({shown})"
        )
    for name in FLAGS:
        value = getattr(SMALL, name)
        parser.add_argument(f"--{name}", type=type(value), default=value, help="setting of the model (%(default)s)")
    options = rows_of.parse(parser, arguments)
    given = vars(options)
    plan = Plan(**{f.name: given[f.name] for f in dataclasses.fields(Plan)})
    settings = dataclasses.replace(SMALL, **{name: given[name] for name in FLAGS})
    with tempfile.TemporaryDirectory() as folder:
        if options.corpus:
            paths = corpus.find(options.corpus, ["train"], options.source, options.target)["train"]
        else:
            paths = corpus.make(folder, train=plan.steps * max(plan.tokens) // settings.longest, dev=1, test=1)["train"]
        work = (paths, settings, plan)
        trainings = keras_ddl.run(diverging.train, np=options.ranks, args=work, env={"TF_CPP_MIN_LOG_LEVEL": "3"})[0]
    sizes = ", ".join(f"{name} {given[name]}" for name in FLAGS)
    print(f"A Transformer ({sizes}) with Adam at a constant rate, {options.ranks} rank(s).")
    print(
        f"Warm-up: {plan.warmup} steps. Guard: windows of {plan.window} steps, the loss below {BLIND} x that of blind "
        f"guesses from number {plan.grace} on; back at most {plan.retries} times, on at {plan.factor} x the rate."
    )
    rows_of.show([row(each, plan.steps) for each in trainings], options, functools.partial(draw, trainings))


if __name__ == "__main__":
    main()
