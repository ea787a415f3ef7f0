"""KerasTuner on the ranks of a job: one search, of which all ranks train each trial together (docs/works-with.md).

    RandomSearch = keras_ddl.tuner.on_all_ranks(keras_tuner.RandomSearch)
    tuner = RandomSearch(build, objective="val_loss", max_trials=10, distribution_strategy=strategy)

Rank 0's oracle chooses the trials, with the results that rank 0 has, and its files are the search's. The oracles of the
other ranks follow: they learn each choice, and keep their own notes in a temporary folder, which begins as a copy of
rank 0's. So nothing is decided twice, and a search resumes from rank 0's files alone, on any number of ranks.
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["on_all_ranks"]

_Tuner = TypeVar("_Tuner", bound=type)


def __dir__() -> list[str]:
    return sorted(__all__)


def on_all_ranks(tuner: _Tuner) -> _Tuner:
    """Makes a class of tuners search once for all ranks, which train each trial together.

    Usable as a decorator of a subclass, too. All ranks make the tuner and call `search` and `get_best_models`, as every
    rank runs the script; rank 0 prints the tables. With one rank the tuner does what it did before.

    Args:
        tuner: keras_tuner.RandomSearch, BayesianOptimization, Hyperband, or another subclass of keras_tuner.Tuner. Its
            `directory` is rank 0's. Where ranks of several hosts are to load weights of earlier runs, all hosts must
            see it.
    Returns: a subclass of it, with the same arguments.
    Raises, when one is made:
        ConfigError: KERASTUNER_ORACLE_IP is set, with which each process runs other trials; or the job goes on without
            lost ranks (`-np MIN:MAX`), one of which may be rank 0 with its oracle.
    Cost: a broadcast of a trial's values, and one of its results.
    """
    from keras_ddl.tuner.one_search import OneSearch

    if issubclass(tuner, OneSearch):
        return tuner
    return type(tuner.__name__, (OneSearch, tuner), {"__module__": tuner.__module__, "__doc__": tuner.__doc__})  # type: ignore[return-value]
