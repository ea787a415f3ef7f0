"""Measures on each rank of a job. `rounds.py` starts the jobs."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from keras_ddl.bench.training import subject
from keras_ddl.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        name: name of the network, or module:function.
        batch: rows per rank; rows of all ranks together if `strong`.
        strong: the global batch is the same on any number of ranks.
        steps: steps per turn.
        cores: cores on which each rank computes, as its device; 0: all that it may use.
        to_accuracy: also train to this accuracy; None: do not.
        epochs: limit on the epochs of that training.
    """

    name: str
    batch: int
    strong: bool
    steps: int
    cores: int
    to_accuracy: float | None
    epochs: int

    def global_batch(self, ranks: int) -> int:
        return self.batch if self.strong else self.batch * ranks


@dataclass(frozen=True)
class Reached:
    """The result of a training to an accuracy: seconds, epochs, and whether the accuracy was reached."""

    seconds: float
    epochs: int
    accuracy: float
    is_reached: bool


@dataclass(frozen=True)
class Sample:
    """One rank's measurements of one turn.

    Attributes:
        step: seconds of a step, the median of a turn.
        traffic: the overlap.Traffic of all ranks; None on one rank, and while KERAS_DDL_TIMELINE is written.
        gradient_bytes: bytes of the trainable variables.
        hosts, cores: number of hosts of the job, and of cores of this rank's host.
        machine: a line about the host.
    """

    step: float
    traffic: tuple[float, ...] | None
    gradient_bytes: int
    hosts: int
    cores: int
    machine: str
    reached: Reached | None


def measure(plan: Plan, train: bool) -> Sample:
    """Measures on the running ranks. COLLECTIVE. train: also train to the accuracy of the plan."""
    import keras_ddl

    keras_ddl.init()
    available = len(os.sched_getaffinity(0))
    take_cores(plan.cores, keras_ddl.rank())  # before TensorFlow creates its threads
    size = keras_ddl.size()
    # Plain Keras on one rank is the reference.
    strategy = keras_ddl.Strategy() if size > 1 else None
    scope = strategy.scope if strategy else nullcontext
    batch = plan.global_batch(size)

    from keras_ddl.bench.rounds import machine
    from keras_ddl.bench.training.overlap import watched
    from keras_ddl.bench.training.step_times import StepTimes

    with scope():
        what = subject.make(plan.name, batch, learnable=False)
    watch = StepTimes()

    def turn(steps: int) -> None:
        what.model.fit(what.batches, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[watch])

    steps = min(plan.steps, _length(what.batches))
    turn(min(3, steps))  # the first step traces
    keras_ddl.barrier()
    turn(steps)
    step = statistics.median(watch.seconds)
    traffic = watched(lambda: turn(steps)) if size > 1 else None
    weights = what.model.trainable_variables
    return Sample(
        step,
        traffic,
        sum(weight.numpy().nbytes for weight in weights),
        keras_ddl.num_hosts(),
        available,
        machine(),
        _to_accuracy(plan, batch, scope) if train else None,
    )


def take_cores(count: int, rank: int) -> None:
    """Restricts this process to `count` cores, different from its neighbours' if there are enough; 0: to all cores."""
    cores = sorted(os.sched_getaffinity(0))
    if 0 < count < len(cores):
        os.sched_setaffinity(0, {cores[(rank * count + number) % len(cores)] for number in range(count)})


def _length(batches: Any) -> int:
    """Returns the number of batches of a PyDataset, which fit does not repeat; for other data, a very large number."""
    length = getattr(batches, "num_batches", None)
    return length or 1 << 62


def _to_accuracy(plan: Plan, batch: int, scope: Any) -> Reached:
    """Trains until the model reaches the plan's accuracy, or for all epochs, and measures the time. COLLECTIVE."""
    import keras

    import keras_ddl
    from keras_ddl.bench.training.step_times import StepTimes
    from keras_ddl.schedules import scale_learning_rate

    assert plan.to_accuracy is not None
    accuracy = plan.to_accuracy
    rate = 0.01 if plan.strong else scale_learning_rate(0.01, "linear")
    keras.utils.set_random_seed(1)  # equal initial weights for any number of ranks
    with scope():
        what = subject.make(plan.name, batch, learnable=True, rate=rate)

    class Clock(StepTimes):
        """Times epochs without validation."""

        accuracy, total, epochs = 0.0, 0.0, 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)
            self.end = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            name = "val_accuracy" if what.validation is not None else "accuracy"
            if name not in logs:
                raise ConfigError(
                    f"bench train: for --to-accuracy the model must be compiled with metrics=['accuracy']. Received: "
                    f"{plan.name}, whose logs have {', '.join(logs)}."
                )
            self.accuracy, self.epochs = float(logs[name]), epoch + 1
            self.total += self.end - self.epoch_start
            self.model.stop_training = self.accuracy >= accuracy

    clock = Clock()
    options: dict[str, Any] = {"epochs": plan.epochs, "verbose": 0, "callbacks": [clock]}
    data = what.data
    if isinstance(data, tuple):
        options |= {"batch_size": batch}
        data, options["y"] = data
    validation = what.validation
    keras.utils.set_random_seed(1)  # the order of the rows
    what.model.fit(data, validation_data=validation, **options)
    clock.total -= max(0.0, clock.seconds[0] - statistics.median(clock.seconds))  # the first step traces
    seconds = max(keras_ddl.all_gather_object(clock.total))
    return Reached(seconds, clock.epochs, clock.accuracy, clock.accuracy >= accuracy)
