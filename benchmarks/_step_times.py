"""How long the steps of a fit take."""

from __future__ import annotations

import time

import keras


class StepTimes(keras.callbacks.Callback):
    """Seconds of each step and of the epoch, as the script sees them."""

    never_stops_within_epoch = True  # else the ranks agree after every step on whether it asks to stop

    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_start = time.perf_counter()

    def on_train_batch_begin(self, batch, logs=None):
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)

    def on_epoch_end(self, epoch, logs=None):
        self.epoch = time.perf_counter() - self.epoch_start
