"""How `Strategy.run` recognizes Keras's step functions: by their caller, never by their contents."""

from __future__ import annotations

import functools
import threading

import pytest

keras = pytest.importorskip("keras")

from keras_ddl.strategy.calls import fits, trainer_calls  # noqa: E402
from keras_ddl.strategy.calls.tracing import as_one_process  # noqa: E402
from keras_ddl.strategy.keras_patches.step_functions import name_of_step  # noqa: E402
from keras_ddl.strategy.step.execution import Execution  # noqa: E402
from keras_ddl.strategy.step.keras_step import execution_of  # noqa: E402


class Model(keras.Model):
    def train_step(self, data):
        return super().train_step(data)

    def own(self, data):
        return data


@pytest.fixture
def model():
    return Model()


def test_models_step_is_recognized_from_any_caller(model):
    executions = [execution_of(getattr(model, name)) for name in ("train_step", "test_step", "predict_step")]
    assert [each.step for each in executions] == ["train_step", "test_step", "predict_step"]
    assert {each.model for each in executions} == {model}


def test_the_programs_functions_are_not_steps(model):
    def step(data):
        return model.train_step(data)

    for function in (step, model.own, functools.wraps(model.train_step)(step), lambda data: model(data)):
        assert execution_of(function) is None


def test_function_that_keras_runs_is_its_step_but_nothing_inside_it(model):
    def wrapped(data):
        return model.predict_step(data)

    execution = Execution(model, "predict_step")
    with execution.entered():
        assert execution_of(wrapped) is execution
        with as_one_process():  # the program's code, which may call Strategy.run
            assert execution_of(wrapped) is None
        in_thread = []
        thread = threading.Thread(target=lambda: in_thread.append(execution_of(wrapped)))
        thread.start()
        thread.join()
        assert in_thread == [None]
    assert execution_of(wrapped) is None


def test_fit_of_a_model_is_known_within_it_and_to_no_other_model(model):
    other = Model()
    with fits.running(model) as fit:
        with trainer_calls.Loop(model, "evaluate").entered(), Execution(model, "test_step").entered():
            assert fits.of(model) is fit and fits.of(other) is None
            with fits.running(other) as inner:
                assert (fits.of(model), fits.of(other)) == (fit, inner)
        assert trainer_calls.innermost() is fit
    assert fits.of(model) is None and not fits.any_is_running()


def test_step_functions_may_have_any_name(model):
    def my_step(data):
        return {}

    assert [name_of_step(model, each) for each in (model.train_step, model.test_step)] == ["train_step", "test_step"]
    model.train_step = my_step
    assert name_of_step(model, model.train_step) == "train_step"
    model.test_step = functools.partial(my_step)
    assert name_of_step(model, model.test_step) == "test_step"
