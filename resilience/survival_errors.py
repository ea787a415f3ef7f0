"""Errors and messages that say why a job does not continue although ranks are left."""

from __future__ import annotations

from keras_ddl.errors import RankLostError, name_of_rank
from keras_ddl.strategy.base import strategy_of
from keras_ddl.strategy.calls import trainer_calls


class TooFewError(RankLostError):
    """Fewer ranks are left than the job may continue with."""


OWN_COLLECTIVE = (
    "Only fit, evaluate, predict and steps of strategy.function continue automatically after a rank is lost. "
    "Received: a collective outside of them, which may have combined values that differ between ranks. Catch "
    "RankLostError on all ranks and call keras_ddl.regroup()."
)


def with_reason(error: Exception, reason: str) -> Exception:
    """Returns `error`, which says which rank was lost, with the reason why the others do not continue."""
    if not hasattr(error, "ends_others"):
        lost = ", ".join(map(name_of_rank, ranks)) if (ranks := getattr(error, "ranks", ())) else "the lost rank"
        rest = "--restarts starts it again, with Checkpoint(..., resume=True) from the last checkpoint."
        error.args = (f"The other ranks do not continue without {lost}. {reason} {rest} ({error})",)
        error.ends_others = True  # type: ignore[attr-defined]  # for the report to the launcher
    return error


PREDICTIONS = (
    "predict can continue without a lost rank only if all ranks have all predictions. Received: "
    "Strategy(gather_predictions='rank0'), and rank 0 was lost. Leave out gather_predictions."
)


def gathers_on_rank_0() -> bool:
    """Whether only rank 0 has the predictions of all ranks."""
    loops = (call for call in trainer_calls.running() if isinstance(call, trainer_calls.Loop))
    strategies = (strategy_of(loop.model) for loop in loops if loop.method == "predict")
    return any(each is not None and each.job.settings.gather_predictions == "rank0" for each in strategies)
