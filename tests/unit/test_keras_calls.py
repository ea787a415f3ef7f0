"""Which functions `Strategy.run` takes for steps of Keras: by who calls, never by what a function looks like inside."""

from __future__ import annotations

import functools
import threading

import pytest

keras = pytest.importorskip("keras")

from keras_ddl.strategy.keras_patches.trainer import _name_of  # noqa: E402
from keras_ddl.strategy.step.keras_step import UNKNOWN, call_of, calling  # noqa: E402
from keras_ddl.strategy.step.tracing import as_one_process  # noqa: E402


class Model(keras.Model):
    def train_step(self, data):
        return super().train_step(data)

    def own(self, data):
        return data


@pytest.fixture
def model():
    return Model()


def test_a_models_step_is_known_whoever_calls_it(model):
    calls = [call_of(getattr(model, name)) for name in ("train_step", "test_step", "predict_step")]
    assert [(call.model, call.name) for call in calls] == [
        (model, "train_step"),
        (model, "test_step"),
        (model, "predict_step"),
    ]


def test_functions_of_the_program_are_its_own(model):
    def step(data):
        return model.train_step(data)

    for function in (step, model.own, functools.wraps(model.train_step)(step), lambda data: model(data)):
        assert call_of(function) is None


def test_whatever_keras_runs_in_its_call_is_its_step_and_nothing_within_that_step(model):
    def wrapped(data):
        return model.predict_step(data)

    with calling(model, "predict_step", UNKNOWN):
        call = call_of(wrapped)
        assert (call.model, call.name, call.steps) == (model, "predict_step", 0)
        with as_one_process():  # the program's code, which may call Strategy.run
            assert call_of(wrapped) is None
        in_thread = []
        thread = threading.Thread(target=lambda: in_thread.append(call_of(wrapped)))
        thread.start()
        thread.join()
        assert in_thread == [None]
    assert call_of(wrapped) is None


def test_step_functions_of_any_name_are_what_the_model_has_them_for(model):
    def my_step(data):
        return {}

    assert [_name_of(model, each) for each in (model.train_step, model.test_step)] == ["train_step", "test_step"]
    model.train_step = my_step
    assert _name_of(model, model.train_step) == "train_step"
    model.test_step = functools.partial(my_step)
    assert _name_of(model, model.test_step) == "test_step"
