"""Figures that a rank reports for `keras-ddl run --metrics-port`: steps, rows, logs, exposed communication."""

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

sent: list[dict[str, Any]] = []  # messages to the launcher


@pytest.fixture
def job_figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """Returns the figures of this process, as in a watched job, written after each step."""
    sent.clear()
    job_figures = Figures()
    monkeypatch.setattr(figures, "current", lambda: job_figures)
    monkeypatch.setattr(counted, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(counted.program, "tell", lambda kind, figures: sent.append(json.loads(json.dumps(figures))))
    return job_figures


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "is_initialized", lambda: True)
    monkeypatch.setattr(communicator, "size", lambda: 2)
    monkeypatch.setattr(communicator, "rank", lambda: 0)


def written() -> dict[str, Any]:
    return sent[-1]


def test_fits_and_loops_are_counted_on_one_rank(job_figures: Figures) -> None:
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
    job_figures: Figures, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "_EVERY_SECONDS", 1.0)
    monkeypatch.setattr(counted.time, "monotonic", lambda: clock[0])
    clock, due = [50.0], []
    for _ in range(25):
        clock[0] += 0.125
        due.append(job_figures.end_step())
        if due[-1]:
            job_figures.write()
    assert [number for number, each in enumerate(due) if each] == [0, 8, 16, 24]
    monkeypatch.setattr(communicator, "rank", lambda: 1)
    clock[0] += 10
    assert not job_figures.end_step()


def test_last_steps_of_a_loop_are_written_at_process_exit(
    job_figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_figures._write_last()
    assert not sent, "nothing was trained, or by another rank"
    job_figures.end_step()
    job_figures.write()
    job_figures.end_step()
    job_figures._write_last()
    assert written()["steps"] == 2


def test_rows_of_several_ranks_are_the_exchanged_counts(job_figures: Figures) -> None:
    own = job_figures.of_fit(SimpleNamespace(), SimpleNamespace(is_several=False))
    own._strategy = SimpleNamespace(is_several=True, keras_steps=SimpleNamespace(rows_trained=np.int64(64)))
    own.begin_batch(0)
    own.end_batch(1, 3, {"loss": np.float32(0.5), "of_each": np.ones(2), "nested": {"a": 1}, "text": "x"})
    assert written() == {"steps": 2, "rows": 64, "logs": {"loss": 0.5}, "epoch": 3}


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Stands for the native core: the collectives that it kept of a step, and the requests to keep them."""
    kept: list[Any] = []
    asked: list[int] = []
    monkeypatch.setattr(native_timeline, "keep", asked.append)
    monkeypatch.setattr(native_timeline, "take", lambda: kept)
    yield [kept, asked]
    recording.keep(0)


def test_exposed_communication_of_a_step_matches_its_timeline(
    collectives: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, asked = collectives
    times = iter([10.0, 11.0, 11.5])
    monkeypatch.setattr(sampling.time, "monotonic", lambda: next(times))
    sample = StepSample()
    # Two collectives of a round: the rank waits from the last submission. Earlier steps do not count.
    kept += [("before", 4, 9.0, 9.0, 9.0, 9.9), ("a", 4, 10.1, 10.2, 10.2, 10.7), ("b", 4, 10.5, 10.5, 10.5, 10.75)]
    sample.step_ended()
    assert sample.end() == pytest.approx(0.25)
    assert asked == [4096, 0]


def test_sample_does_not_take_collectives_from_the_program(collectives: list[Any]) -> None:
    _, asked = collectives
    timeline.keep(7)
    sample = StepSample()
    sample.step_ended()
    assert sample.end() is None and asked == [7]
    timeline.keep(0)
    sample = StepSample()
    timeline.keep(7)  # the program starts keeping them
    sample.step_ended()
    assert sample.end() is None and asked == [7, 0, 4096, 7]


def test_last_sample_ends_with_the_fit(job_figures: Figures, collectives: list[Any], two_ranks: None) -> None:
    own = job_figures.of_fit(SimpleNamespace(), SimpleNamespace(is_several=False))
    job_figures._steps_until_sample = 0
    job_figures.begin_step()
    job_figures.end_step()
    assert collectives[1] == [4096]
    own.end_fit()
    assert collectives[1] == [4096, 0] and job_figures._sample is None


def test_exposed_communication_covers_all_steps(
    job_figures: Figures, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step waits 0.25 s, and the sampled ones stand for the others. The program's random numbers are unchanged."""
    looked: list[int] = []

    class Sample:
        def __init__(self) -> None:
            looked.append(job_figures._steps)

        def step_ended(self) -> None: ...

        def end(self) -> float:
            return 0.25

    monkeypatch.setattr(counted, "_sample", Sample)
    before = random.getstate()
    for number in range(1, 1001):
        job_figures.begin_step()
        job_figures.end_step()
        if number % 100 == 0:
            job_figures.write()
    assert random.getstate() == before
    job_figures.begin_step()
    job_figures.write()
    assert 8 <= len(looked) <= 10
    assert len({number % 100 for number in looked}) > 3, "not always the step after a write"
    assert 0.25 * 800 <= written()["exposed"] <= 0.25 * 1000
