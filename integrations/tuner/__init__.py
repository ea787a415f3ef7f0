"""KerasTuner on the ranks of a job: one search, in which all ranks train each trial together (docs/works-with.md).

    RandomSearch = keras_ddl.tuner.on_all_ranks(keras_tuner.RandomSearch)
    tuner = RandomSearch(build, objective="val_loss", max_trials=10, distribution_strategy=strategy)

Rank 0's oracle chooses the trials from rank 0's results, and rank 0 writes the files of the search. The oracles of the
other ranks get each choice, and keep their own files in a temporary folder, which starts as a copy of rank 0's. So each
decision is made once, and a search resumes from rank 0's files alone, on any number of ranks.
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["on_all_ranks"]

_Tuner = TypeVar("_Tuner", bound=type)


def __dir__() -> list[str]:
    return sorted(__all__)


def on_all_ranks(tuner: _Tuner) -> _Tuner:
    """Makes a class of tuners search once for all ranks, which train each trial together.

    It can also decorate a subclass. All ranks make the tuner and call `search` and `get_best_models`, because every
    rank runs the script; rank 0 prints the tables. With one rank the tuner works as before.

    Args:
        tuner: keras_tuner.RandomSearch, BayesianOptimization, Hyperband, or another subclass of keras_tuner.Tuner. Its
            `directory` is rank 0's. If ranks on several hosts should load weights of earlier runs, all hosts must see
            it.
    Returns: a subclass of `tuner` with the same arguments.
    Raises, when a tuner is made:
        ConfigError: KERASTUNER_ORACLE_IP is set, so each process would run other trials; or the job continues without
            lost ranks (`-np MIN:MAX`), and rank 0 with its oracle could be lost.
    Cost: for each trial a broadcast of its values and a broadcast of its results.
    """
    from keras_ddl.tuner.one_search import OneSearch

    if issubclass(tuner, OneSearch):
        return tuner
    return type(tuner.__name__, (OneSearch, tuner), {"__module__": tuner.__module__, "__doc__": tuner.__doc__})  # type: ignore[return-value]
