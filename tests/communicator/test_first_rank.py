"""Work done by rank 0 alone, whose result or error all ranks share; tested without ranks."""

from __future__ import annotations

from typing import Any

import pytest

from keras_ddl import communicator
from keras_ddl.communicator import first_rank
from keras_ddl.communicator.newcomers import history
from keras_ddl.errors import ConfigError, RankError


def test_work_of_rank_0_runs_once_although_another_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(history, "_recover", lambda call, variables: [call(None), call(None)][1])

    def work() -> int:
        made.append(1)
        return len(made)

    assert first_rank.on_first_rank(work, "work") == 1 and made == [1]

    def fails() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        first_rank.on_first_rank(fails, "fails")


class NeedsMore(ValueError):
    def __init__(self, one: str, other: int) -> None:
        super().__init__(one)


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (ValueError("no row 3"), ValueError, "no row 3"),
        (ConfigError("no such key"), ConfigError, "rank 0: no such key"),
        (NeedsMore("what", 2), RankError, "rank 0: NeedsMore: what"),  # cannot be unpickled
        (type("Unknown", (Exception,), {})("what"), RankError, "rank 0: Unknown: what"),
    ],
)
def test_error_of_rank_0_is_raised_on_every_rank(
    raised: Exception, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def broadcast_object(message: Any, name: str) -> Any:
        sent.append(message)
        return sent[0]

    monkeypatch.setattr(communicator, "is_initialized", lambda: True)
    monkeypatch.setattr(communicator, "size", lambda: 2)
    monkeypatch.setattr(communicator, "as_one", lambda run: run())
    monkeypatch.setattr(communicator, "broadcast_object", broadcast_object)

    def work() -> None:
        raise raised

    monkeypatch.setattr(communicator, "rank", lambda: 0)
    with pytest.raises(type(raised)) as on_rank_0:
        first_rank.on_first_rank(work, "work")
    assert on_rank_0.value is raised
    monkeypatch.setattr(communicator, "rank", lambda: 1)
    with pytest.raises(kind) as on_rank_1:
        first_rank.on_first_rank(work, "work")
    assert (type(on_rank_1.value), str(on_rank_1.value)) == (kind, text)
