"""The CallbackList for several ranks: only rank 0 writes files, and all ranks start from one state and stop together.

It replaces keras/src/callbacks/callback_list.py (3.15.1) in Keras's trainer.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator import recording
from keras_ddl.communicator.comparison import require_equal_values
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import callbacks as keras_callbacks
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models, replacing
from keras_ddl.compat.keras import keras
from keras_ddl.compat.optimizers import learning_rate_variable
from keras_ddl.state.callback_state import JobCallback
from keras_ddl.strategy import accumulation, agreement, figures
from keras_ddl.strategy.agreement import follow_rank_0
from keras_ddl.strategy.agreement.drift import DriftCheck
from keras_ddl.strategy.agreement.random_state import python_random_digest
from keras_ddl.strategy.base import BaseStrategy, strategy_of, strategy_of_ranks
from keras_ddl.strategy.calls import fits, trainer_calls
from keras_ddl.strategy.keras_patches import progress
from keras_ddl.strategy.keras_patches.model_saves import Saves
from keras_ddl.strategy.keras_patches.saving import MidEpochSaves
from keras_ddl.strategy.keras_patches.standby import StandIn, silence
from keras_ddl.strategy.saving import writers
from keras_ddl.strategy.shards import gathered_slots, sharded_slots
from keras_ddl.strategy.variables.origin import of_one_rank

_BATCH_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}
_KerasList: Any = keras_compat.CallbackList


def adopted(callbacks: Any) -> Any:
    """Returns the program's `callbacks`, and turns a Keras CallbackList into this module's CallbackList."""
    if type(callbacks) is _KerasList:
        replacing.exchange_class(callbacks, CallbackList)
        if callbacks.model is not None:
            callbacks.set_model(callbacks.model)
    return callbacks


def _hook(
    name: str,
    then: Callable[[CallbackList], None] = lambda _: None,
    *,
    before: Callable[[CallbackList], None] = lambda _: None,
) -> Callable[..., None]:
    """Returns a hook in which callbacks may make variables on one rank, for example when rank 0 loads a model. Outside
    of such a hook, making a variable in a scope is COLLECTIVE. `before` and `then` run on all ranks.
    """
    original = getattr(_KerasList, name)

    @functools.wraps(original)
    def method(self: CallbackList, *args: Any, **kwargs: Any) -> None:
        before(self)
        with self._of_one_rank():
            original(self, *args, **kwargs)
        then(self)

    return method


class CallbackList(_KerasList):
    """Keras's CallbackList, for a model of several ranks."""

    callbacks: list[Any]
    # Class attributes, because `adopted` turns existing Keras lists into this class.
    _drift: DriftCheck | None = None  # set while a fit on several ranks trains, like _saves
    _saves: MidEpochSaves | None = None
    _step_begin: float | None = None
    _figures: figures.FitFigures | None = None  # if the job has a watcher
    position: tuple[int, int, Any] = (0, 0, None)  # epochs done, batches done in the epoch, logs of the last batch
    _is_beginning = False  # the ranks have not yet agreed on the state that fit starts from
    _model_saves: Sequence[Saves] = ()
    stand_ins: Sequence[StandIn] = ()  # for the callbacks that write, on ranks other than 0
    _ask_to_stop: frozenset[str] = frozenset()  # kinds of loops in which a callback of some rank may ask to stop

    on_batch_begin = _hook("on_batch_begin")
    on_batch_end = _hook("on_batch_end")
    on_test_batch_begin = _hook("on_test_batch_begin")
    on_predict_batch_begin = _hook("on_predict_batch_begin")
    on_test_end = _hook("on_test_end", lambda self: self.flush(), before=lambda self: self._finish_step("test_end"))
    on_predict_end = _hook("on_predict_end", before=lambda self: self._finish_step("predict_end"))
    # The ranks agree whether any of them may ask to stop after a batch, and all get rank 0's model.
    on_test_begin = _hook("on_test_begin", lambda self: self._begin_loop("test", "evaluate begins"))
    on_predict_begin = _hook("on_predict_begin", lambda self: self._begin_loop("predict", "predict begins"))
    on_test_batch_end = _hook(
        "on_test_batch_end",
        lambda self: self._agree_to_stop("test", "stop_evaluating"),
        before=lambda self: self._finish_step("test_batch_end") if "test" in self._ask_to_stop else None,
    )
    on_predict_batch_end = _hook(
        "on_predict_batch_end",
        lambda self: self._agree_to_stop("predict", "stop_predicting"),
        before=lambda self: self._finish_step("predict_batch_end") if "predict" in self._ask_to_stop else None,
    )

    @property
    def _strategy(self) -> BaseStrategy | None:
        """The Strategy of the callbacks' model if it has more than one rank, else None."""
        return strategy_of_ranks(self.model)

    def _of_one_rank(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._strategy is None else of_one_rank(True)

    def set_model(self, model: Any) -> None:
        """Leaves writing to rank 0. Callbacks that save the state of others go last."""
        strategy = strategy_of_ranks(model)
        self.callbacks.sort(key=_runs_last)
        for callback in self.callbacks:
            replacing.restore(callback)  # it may have been used by another rank's list or another model
            if _runs_last(callback):
                callback.others = self.callbacks
            if isinstance(callback, keras.callbacks.SwapEMAWeights):
                keras_callbacks.replace_swap(callback, functools.partial(_swap_gathered, callback))
        self._model_saves = self.stand_ins = ()
        if strategy is not None:
            self._leave_writing_to_rank_0(strategy)
        super().set_model(model)

    def _leave_writing_to_rank_0(self, strategy: BaseStrategy) -> None:
        is_other, goes_on = strategy.rank != 0, strategy.job.goes_on
        finished = strategy.resilience.finished if goes_on else None
        if goes_on or not is_other:
            for callback in self.callbacks:
                progress.adopt(callback)
        saves = [each for each in map(Saves.of, self.callbacks) if each is not None]
        self._model_saves = saves if goes_on else ()
        for save in saves:
            if goes_on:
                save.share()
            elif is_other:
                save.leave_to_rank_0()
        if is_other:
            silenced = [silence(each, finished) for each in self.callbacks]
            self.stand_ins = [each for each in silenced if each is not None]
        loop = trainer_calls.innermost()
        if goes_on and isinstance(loop, trainer_calls.Loop) and self not in loop.followers:
            loop.followers.append(self)

    def set_params(self, params: Any) -> None:
        """Hides `verbose` from ranks other than 0 in a job that continues without a lost rank."""
        super().set_params(params)
        strategy = self._strategy
        if params and strategy is not None and strategy.job.goes_on and strategy.rank != 0:
            for callback in self.callbacks:
                callback.set_params({**params, "verbose": 0})

    def become_first(self, *, may_lack_last: bool) -> None:
        """Called when this rank becomes rank 0: its writers write from now on."""
        keras_callbacks.finish_batch_hooks(self)
        stand_ins, self.stand_ins = {id(each.writer): each for each in self.stand_ins}, ()
        with of_one_rank(True):
            for callback in self.callbacks:
                if (stand_in := stand_ins.get(id(callback))) is not None:
                    stand_in.become_writer(self.params, may_lack_last=may_lack_last, has_begun=not self._is_beginning)
                elif self.params:
                    callback.set_params(self.params)
            for saves in self._model_saves:
                saves.become_first()

    def flush(self, within_epoch: bool = False) -> None:
        """Flushes TensorBoard's data, so that it is not lost with rank 0 in a job that continues."""
        strategy = self._strategy
        if strategy is not None and strategy.job.goes_on:
            for callback in self.callbacks:
                if isinstance(callback, keras.callbacks.TensorBoard) and not (
                    within_epoch and callback.update_freq == "epoch"
                ):
                    keras_callbacks.flush_points(callback)

    def compare(self) -> None:
        """Compares the weights of all ranks if they train and a rank was lost. COLLECTIVE."""
        if self._drift is not None and self._strategy is not None:
            self._drift.compare()

    def on_train_begin(self, logs: Any = None) -> None:
        """After all callbacks, checks that ranks have one model, and gives all ranks rank 0's first epoch and values.

        The check runs after them, because a callback may restore an earlier state on rank 0.
        """
        with sharded_slots.deferring_restored_values(True):
            self._begin_training(logs)

    def _begin_training(self, logs: Any) -> None:
        """Runs on_train_begin of the callbacks, then makes ranks agree on the state that training starts from."""
        self._drift = self._saves = None
        self._figures = figures.of_fit(self.model)
        self._is_beginning = True
        self._end_joining()  # in case an earlier fit was interrupted
        strategy = self._strategy
        before = None if strategy is None else follow_rank_0.Held(self.model, strategy.job)
        with self._of_one_rank():
            super().on_train_begin(logs)
        if strategy is None or before is None:
            return
        model = self.model
        with self._of_one_rank():
            agreement.build_optimizers_as_rank_0(model)
        agreement.check_same_model(model)
        _agree_on_steps(self)
        agreement.agree_on_initial_epoch(model)
        follow_rank_0.follow_before_training(model, strategy.job, before)
        _agree_on_global_seed(model)
        self._drift = DriftCheck(model, strategy.job)
        self._is_beginning = False
        self._saves = MidEpochSaves(self, strategy.job)
        self._agree_who_may_stop("train")
        self._agree_to_stop_training()
        self.position = (keras_callbacks.initial_epoch(model) or 0, 0, None)
        strategy.resilience.joining.begin_fit(self)

    def on_train_end(self, logs: Any = None) -> None:
        """After all callbacks, gives all ranks rank 0's weights, and lets no more ranks join."""
        with self._of_one_rank():
            super().on_train_end(logs)
        self._follow_rank_0()
        if self._figures is not None:
            self._figures.end_fit()
        self._end_joining()

    def _follow_rank_0(self) -> None:
        """Gives all ranks the weights of rank 0, which its callbacks may have changed when training ended.
        COLLECTIVE."""
        strategy = self._strategy
        if strategy is not None and self._drift is not None:
            held = follow_rank_0.Held(self.model, strategy.job, with_optimizers=True)
            name = agreement.name_of(self.model, "train_end")
            held.follow(communicator.all_gather_object(held.digests(), name=name), "fit has ended")

    def _end_joining(self) -> None:
        strategy = strategy_of(self.model)  # even if only one rank is left
        if strategy is not None and fits.is_outermost(self.model):
            strategy.resilience.joining.end_fit()

    def agreed_state(self) -> list[Any]:
        """Returns the objects whose plain attributes hold the state that the ranks have agreed on in this fit."""
        return [each for each in (self._drift, self._saves) if each is not None]

    def checksums(self) -> dict[str, int]:
        """Returns name -> checksum of everything that must be equal on all ranks."""
        return {} if self._drift is None else self._drift.checksums()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """After all callbacks, makes Python's random generator, which shuffles a PyDataset, equal on all ranks."""
        with self._of_one_rank():
            super().on_epoch_begin(epoch, logs)
        strategy = self._strategy
        self.position = (epoch, 0, None)
        if strategy is None or self._drift is None:
            return
        if strategy.resilience.joining.begin_epoch():  # on a joining rank, the others have already done the rest
            return
        mine = (bool(self.model.__dict__.get("stop_training")), python_random_digest())
        gathered = communicator.all_gather_object(mine, name=agreement.name_of(self.model, "epoch_begin"))
        self._drift.begin_epoch()
        strategy.random_state.agree_python([digest for _, digest in gathered])
        self._set_agreed_stop(any(stop for stop, _ in gathered))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """After all callbacks, compares the ranks' weights, and stops on all ranks if any rank wants to stop."""
        self._finish_step("epoch_end")
        strategy = self._strategy
        if strategy is not None and strategy.resilience.joining.has_newcomers:
            self.compare()  # before callbacks change weights that no step has used yet
        readable = self._saves.gathered_slots() if self._saves is not None else contextlib.nullcontext()
        with self._of_one_rank(), readable:
            super().on_epoch_end(epoch, logs)
        if self._figures is not None:
            self._figures.end_epoch(epoch, logs)
        self.flush()
        if strategy is not None:
            strategy.resilience.joining.prove(self)
        if self._drift is not None:
            self._drift.after_epoch()
            self._agree_to_stop_training()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """After all callbacks, begins the step in the timeline, if one is being written."""
        with self._of_one_rank():
            super().on_train_batch_begin(batch, logs)
        if self._figures is not None:
            self._figures.begin_batch(batch)
        self._step_begin = time.monotonic() if recording.is_on() else None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Before the callbacks, gathers variables that rank 0 is about to save. After them, if a callback could have
        asked to stop, stops on all ranks if any rank wants to.
        """
        if self._step_begin is not None:
            recording.add_span(f"step {batch}", self._step_begin)
        if self._figures is not None:
            self._figures.end_batch(batch, self.position[0], logs)
        if self._drift is None or self._saves is None:
            super().on_train_batch_end(batch, logs)
            return
        self.position = (self.position[0], batch + 1, logs)
        due, may_stop = self._saves.before_batch_end(batch), "train" in self._ask_to_stop
        if may_stop:  # a callback that can stop can also read variables
            self._finish_step("train_batch_end")
            accumulation.combine(self.model)
        readable = self._saves.gathered_slots() if due else contextlib.nullcontext()
        with of_one_rank(True), readable:
            super().on_train_batch_end(batch, logs)
        self.flush(within_epoch=True)
        self._drift.after_batch()
        if may_stop:
            self._agree_to_stop_training()

    def _finish_step(self, moment: str) -> None:
        """Ends the step in a job that continues without a lost rank. A rank that is behind gets the step's results from
        another rank. Callbacks must not have changed them yet, because they will also run on the rank that is behind.
        """
        strategy = self._strategy
        if strategy is not None and strategy.job.goes_on:
            communicator.barrier(name=agreement.name_of(self.model, moment))

    def _begin_loop(self, kind: str, call: str) -> None:
        """Called when evaluate or predict begins. COLLECTIVE, with one exchange."""
        strategy = self._strategy
        if strategy is None:
            return
        step = strategy.keras_steps.step_of(self.model, f"{kind}_step")
        in_metrics = {id(models.inner_variable(each)) for each in models.metric_variables(self.model)}
        further = [each for each in step.used_variables() if id(each) not in in_metrics]
        held = follow_rank_0.Held(self.model, strategy.job, further)
        name = agreement.name_of(self.model, f"{kind}_begins")
        gathered = communicator.all_gather_object((_may_stop(self, kind), held.digests()), name=name)
        asks, digests = any(asks for asks, _ in gathered), [each for _, each in gathered]
        self._ask_to_stop = self._ask_to_stop | {kind} if asks else self._ask_to_stop - {kind}
        if fits.of(self.model) is None:
            held.follow(digests, call)
        else:
            drift = DriftCheck(self.model, strategy.job) if self._drift is None else self._drift
            drift.require_equal(held.compared, digests)

    def _agree_who_may_stop(self, kind: str) -> None:
        if self._strategy is not None:
            name = agreement.name_of(self.model, f"{kind}_batch_hooks")
            asks = agreement.any_rank(_may_stop(self, kind), name)
            self._ask_to_stop = self._ask_to_stop | {kind} if asks else self._ask_to_stop - {kind}

    def _agree_to_stop(self, kind: str, attribute: str) -> None:
        if kind in self._ask_to_stop and self._strategy is not None:
            wants = bool(getattr(self.model, attribute, False))
            setattr(self.model, attribute, agreement.any_rank(wants, agreement.name_of(self.model, attribute)))

    def _agree_to_stop_training(self) -> None:
        wants = bool(self.model.__dict__.get("stop_training"))
        self._set_agreed_stop(agreement.any_rank(wants, agreement.name_of(self.model, "stop_training")))

    def _set_agreed_stop(self, stop: bool) -> None:
        fit = fits.of(self.model)
        if fit is not None:
            fit.agreed_stop = stop


def _swap_gathered(callback: keras.callbacks.SwapEMAWeights, *functions: Any) -> None:
    """Swaps weights and their averages, even those in shards. COLLECTIVE if some are in shards."""
    with gathered_slots.gathered(gathered_slots.slots_of(callback.model)):
        keras_callbacks.original_swap(callback, *functions)


def _agree_on_global_seed(model: keras.Model) -> None:
    """Gives Keras's global seed generator, which does not belong to the model, rank 0's state on all ranks."""
    generator = keras_compat.global_seed_generator()
    mine = None if generator is None else generator.state.numpy()
    state = communicator.broadcast_object(mine, name=agreement.name_of(model, "global_seed"))
    if communicator.rank() != 0 and state is None:
        # A new generator is seeded by Python's random state, which is equal on all ranks.
        keras_compat.forget_global_seed_generator()
    elif communicator.rank() != 0:
        keras_compat.make_global_seed_generator().state.assign(state)


def _agree_on_steps(callbacks: CallbackList) -> None:
    mine = (callbacks.params.get("steps"), callbacks.params.get("epochs"))
    gathered = communicator.all_gather_object(
        (mine, _rates_and_step(callbacks.model)), name=agreement.name_of(callbacks.model, "steps")
    )
    require_equal_values(
        [f"{steps} steps x {epochs} epochs" for (steps, epochs), _ in gathered],
        "All ranks must train for the same number of steps and epochs.",
        "Give every rank all the data, not its part of it: keras_ddl takes each rank's rows from every batch.",
    )
    _warn_of_rates([rates for _, rates in gathered], communicator.rank())


def _rates_and_step(model: Any) -> tuple[list[float], int]:
    """Returns the learning rates that are numbers rather than schedules, and the steps taken so far."""
    optimizers = models.optimizers_with_rates(model)
    rates = [learning_rate_variable(each) for each in optimizers]
    return [float(rate.numpy()) for rate in rates if rate is not None], models.steps_taken(optimizers) or 0


def _warn_of_rates(gathered: list[tuple[list[float], int]], rank: int) -> None:
    """Warns that all ranks will use rank 0's learning rates, unless only rank 0 has restored an earlier run."""
    rates, steps = zip(*gathered)
    if rank == 0 and any(each != rates[0] for each in rates) and len(set(steps)) == 1:
        received = (f"{', '.join(f'{rate:g}' for rate in each)} on rank {other}" for other, each in enumerate(rates))
        stack_position.warn(agreement.ONE_LEARNING_RATE.format(", ".join(received)))


def _runs_last(callback: Any) -> bool:
    return isinstance(callback, JobCallback) and callback.runs_last


def _may_stop(callbacks: Any, kind: str) -> bool:
    """Whether a callback has its own code that runs within an epoch and might ask to stop."""
    base = keras.callbacks.Callback
    never = (keras.callbacks.History, keras.callbacks.ModelCheckpoint)
    for callback in callbacks.callbacks:
        own = replacing.class_of(callback)
        if own in never or writers.only_writes(callback) or getattr(callback, "never_stops_within_epoch", False):
            continue
        kinds = (base, writers.writing_class(callback) or base)
        for hook in _BATCH_HOOKS[kind]:
            inherited = [getattr(each, hook) for each in kinds]
            if hook in vars(callback) or getattr(own, hook, None) not in inherited:
                return True
    return False
