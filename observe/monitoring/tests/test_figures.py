"""What a rank tells `keras-ddl run --metrics-port`: counts of steps and rows, logs, exposed communication."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import keras_ddl
from keras_ddl import communicator, timeline
from keras_ddl.communicator import recording
from keras_ddl.communicator.native import native_timeline
from keras_ddl.monitoring import figures as counted
from keras_ddl.monitoring.figures import Figures
from keras_ddl.strategy import figures
from keras_ddl.timeline import sampling
from keras_ddl.timeline.sampling import StepSample

sent: list[dict[str, Any]] = []  # what the launcher was told


@pytest.fixture
def of_job(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """The figures of this process, as in a job that is watched. Written after each step."""
    sent.clear()
    of_job = Figures()
    monkeypatch.setattr(figures, "current", lambda: of_job)
    monkeypatch.setattr(counted, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(counted.program, "tell", lambda kind, figures: sent.append(json.loads(json.dumps(figures))))
    return of_job


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "is_initialized", lambda: True)
    monkeypatch.setattr(communicator, "size", lambda: 2)
    monkeypatch.setattr(communicator, "rank", lambda: 0)


def written() -> dict[str, Any]:
    return sent[-1]


def test_fits_and_loops_are_counted_on_one_rank(of_job: Figures) -> None:
    strategy = keras_ddl.Strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=2)
    x = np.ones((10, 2), "float32")
    history = model.fit(x, x[:, :1], batch_size=3, epochs=2, validation_data=(x, x[:, :1]), verbose=0)
    after_fit = written()
    assert (after_fit["steps"], after_fit["rows"], after_fit["epoch"]) == (8, 20, 1)
    assert after_fit["logs"] == {name: pytest.approx(each[-1]) for name, each in history.history.items()}
    assert after_fit["logs"].keys() == {"loss", "mae", "val_loss", "val_mae"}
    assert "exposed" not in after_fit, "one rank waits for nobody"

    step = strategy.function(lambda x, scale: keras.ops.sum(model(x)) * scale)
    for rows in (4, 5):
        step(x[:rows], 0.5)
    assert (written()["steps"], written()["rows"]) == (10, 29)


def test_figures_are_written_once_a_second_by_the_first_rank(
    of_job: Figures, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "_EVERY_SECONDS", 1.0)
    monkeypatch.setattr(counted.time, "monotonic", lambda: clock[0])
    clock, due = [50.0], []
    for _ in range(25):
        clock[0] += 0.125
        due.append(of_job.end_step())
        if due[-1]:
            of_job.write()
    assert [number for number, each in enumerate(due) if each] == [0, 8, 16, 24]
    monkeypatch.setattr(communicator, "rank", lambda: 1)
    clock[0] += 10
    assert not of_job.end_step()


def test_last_steps_of_a_loop_are_written_at_the_end_of_the_process(
    of_job: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_job._write_last()
    assert not sent, "nothing was trained, or by another rank"
    of_job.end_step()
    of_job.write()
    of_job.end_step()
    of_job._write_last()
    assert written()["steps"] == 2


def test_rows_of_several_ranks_are_those_that_they_have_exchanged(of_job: Figures) -> None:
    own = of_job.of_fit(SimpleNamespace(), SimpleNamespace(is_several=False))
    own._strategy = SimpleNamespace(is_several=True, keras_steps=SimpleNamespace(rows_trained=np.int64(64)))
    own.begin_batch(0)
    own.end_batch(1, 3, {"loss": np.float32(0.5), "of_each": np.ones(2), "nested": {"a": 1}, "text": "x"})
    assert written() == {"steps": 2, "rows": 64, "logs": {"loss": 0.5}, "epoch": 3}


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the native core has kept of a step, and what it is asked to keep."""
    kept: list[Any] = []
    asked: list[int] = []
    monkeypatch.setattr(native_timeline, "keep", asked.append)
    monkeypatch.setattr(native_timeline, "take", lambda: kept)
    yield [kept, asked]
    recording.keep(0)


def test_exposed_communication_of_a_step_is_that_of_its_timeline(
    collectives: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, asked = collectives
    times = iter([10.0, 11.0, 11.5])
    monkeypatch.setattr(sampling.time, "monotonic", lambda: next(times))
    sample = StepSample()
    # Two of a round: the rank waits from the last submission; one of the step before does not count.
    kept += [("before", 4, 9.0, 9.0, 9.0, 9.9), ("a", 4, 10.1, 10.2, 10.2, 10.7), ("b", 4, 10.5, 10.5, 10.5, 10.75)]
    sample.step_ended()
    assert sample.end() == pytest.approx(0.25)
    assert asked == [4096, 0]


def test_a_sample_leaves_collectives_to_the_program_that_keeps_them(collectives: list[Any]) -> None:
    _, asked = collectives
    timeline.keep(7)
    sample = StepSample()
    sample.step_ended()
    assert sample.end() is None and asked == [7]
    timeline.keep(0)
    sample = StepSample()
    timeline.keep(7)  # meanwhile
    sample.step_ended()
    assert sample.end() is None and asked == [7, 0, 4096, 7]


def test_a_sample_of_the_last_step_ends_with_the_fit(of_job: Figures, collectives: list[Any], two_ranks: None) -> None:
    own = of_job.of_fit(SimpleNamespace(), SimpleNamespace(is_several=False))
    of_job._steps_until_sample = 0
    of_job.begin_step()
    of_job.end_step()
    assert collectives[1] == [4096]
    own.end_fit()
    assert collectives[1] == [4096, 0] and of_job._sample is None


def test_exposed_communication_is_that_of_all_steps(
    of_job: Figures, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step waits for 0.25 s, and those looked at stand for the others. Random numbers stay as they are."""
    looked: list[int] = []

    class Sample:
        def __init__(self) -> None:
            looked.append(of_job._steps)

        def step_ended(self) -> None: ...

        def end(self) -> float:
            return 0.25

    monkeypatch.setattr(counted, "_sample", Sample)
    before = random.getstate()
    for number in range(1, 1001):
        of_job.begin_step()
        of_job.end_step()
        if number % 100 == 0:
            of_job.write()
    assert random.getstate() == before
    of_job.begin_step()
    of_job.write()
    assert 8 <= len(looked) <= 10
    assert len({number % 100 for number in looked}) > 3, "not always the step after a write"
    assert 0.25 * 800 <= written()["exposed"] <= 0.25 * 1000
