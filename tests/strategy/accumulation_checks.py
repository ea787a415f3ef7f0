"""Accumulated gradients read as in one process wherever the program may look. Run by test_strategy.py."""

import numpy as np

from harness.rank_program import long
from strategy.common import RANK, STRATEGY, X, Y, dense_model, keras, own_rows, set_precision
from strategy.oracle import Trained, case, fit


def accumulating(scope, steps=3, **options):
    with scope:
        model = dense_model()
        model.compile(keras.optimizers.AdamW(0.02, gradient_accumulation_steps=steps, **options), "mse")
    return model


def slots(model):
    return [variable.numpy() for variable in model.optimizer.variables]


class Looks(keras.callbacks.Callback):
    """Reads all that the optimizer keeps, at every call that may."""

    def __init__(self, *hooks):
        super().__init__()
        self.seen = []
        for hook in hooks:
            setattr(self, hook, lambda *_, **__: self.seen.append(slots(self.model)))


@case()
def check_what_a_fit_leaves_in_the_middle_of_an_accumulation(scope):
    model = accumulating(scope)
    logs = {}
    for number, rows in enumerate((20, 40, 10)):  # 2, 4 and 1 steps
        trained = fit(model, X[:rows], Y[:rows], epochs=1, validation_data=(X[:5], Y[:5]))
        logs[f"fit {number}"] = [trained.logs, slots(model)]
    return Trained(model, logs)


@long
@case()
def check_what_callbacks_see_of_an_accumulation(scope):
    model = accumulating(scope)
    hooks = ("on_train_begin", "on_epoch_begin", "on_test_begin", "on_epoch_end", "on_train_end")
    between = Looks(*hooks)
    first = fit(model, X[:40], Y[:40], callbacks=[between], validation_data=(X[:5], Y[:5])).logs
    within = Looks(*hooks, "on_train_batch_begin", "on_train_batch_end")
    second = fit(model, X[:40], Y[:40], callbacks=[within]).logs
    return Trained(model, {"first": first, "second": second, "between": between.seen, "within": within.seen})


@long
@case()
def check_single_batches_in_the_middle_of_an_accumulation(scope):
    model = accumulating(scope)
    logs = {"fit": fit(model, X[:40], Y[:40], epochs=1).logs}
    for number in range(5):
        logs[f"step {number}"] = [model.train_on_batch(*own_rows(scope, 9)), slots(model)]
    logs["again"] = [fit(model, X[:20], Y[:20], epochs=1).logs, slots(model)]
    return Trained(model, logs)


@long
@case()
def check_accumulators_that_the_program_sets(scope):
    model = accumulating(scope)
    fit(model, X[:20], Y[:20], epochs=1)
    accumulators = [each for each in model.optimizer.variables if each.path.endswith("gradient_accumulator")]
    assert len(accumulators) == len(model.trainable_variables)
    for variable in accumulators:
        variable.assign(2.0 * variable + 1.0)
    return fit(model, X[:20], Y[:20], epochs=1)


@long
@case()
def check_a_fit_that_is_broken_off_in_the_middle_of_an_accumulation(scope):
    model = accumulating(scope)

    class Breaks(keras.callbacks.Callback):
        never_stops_within_epoch = True  # nothing is combined on its account

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyError("enough")

    try:
        fit(model, X[:40], Y[:40], callbacks=[Breaks()])
    except KeyError:
        pass
    return fit(model, X[:40], Y[:40])


@long
@case()
def check_an_accumulation_under_loss_scaling(scope):
    with scope:
        model = dense_model()
        inner = keras.optimizers.AdamW(0.02, gradient_accumulation_steps=3)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), "mse")
    logs = {}
    for number, rows in enumerate((20, 40)):
        logs[f"fit {number}"] = [fit(model, X[:rows], Y[:rows], epochs=1).logs, slots(model)]
    return Trained(model, logs)


@long
@case()
def check_eager_steps_between_others(scope):
    model = accumulating(scope)
    fit(model, X[:20], Y[:20], epochs=1)
    with STRATEGY.scope() if model.distribute_strategy is STRATEGY else scope:
        model.compile(model.optimizer, "mse", run_eagerly=True)
    return fit(model, X[:40], Y[:40], epochs=1)


def check_reading_on_one_rank_waits_for_no_other():
    set_precision("float64")
    model = accumulating(STRATEGY.scope())
    fit(model, X[:20], Y[:20], epochs=1)
    if RANK == 0:
        assert any(np.any(each) for each in slots(model))
