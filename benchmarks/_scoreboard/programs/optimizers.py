"""Programs about optimizers: clipping, accumulation, averages, precision, and callbacks that control them."""

from __future__ import annotations

import keras
import numpy as np

from _scoreboard.peers import Peer
from _scoreboard.programs.common import Values, X, Y, dense, layers, program, sgd, train


@program("clipnorm")
def clip_norm(peer: Peer) -> Values:
    return train(peer, optimizer=lambda: sgd(clipnorm=0.05))


@program("global_clipnorm")
def clip_global_norm(peer: Peer) -> Values:
    return train(peer, optimizer=lambda: sgd(global_clipnorm=0.1))


@program("gradient_accumulation_steps=2")
def accumulation(peer: Peer) -> Values:
    return train(peer, optimizer=lambda: sgd(gradient_accumulation_steps=2))


@program("averaged weights (use_ema)")
def averaged(peer: Peer) -> Values:
    return train(peer, optimizer=lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3))


@program("mixed_float16: a step overflows in one row and is skipped", tolerance=5e-3)
def mixed_precision(peer: Peer) -> Values:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    x, y = X.copy(), Y.copy()
    y[12] = 3e3  # in the second batch; its gradient, scaled, is infinite in float16

    def optimizer() -> keras.Optimizer:
        inner = keras.optimizers.SGD(0.05)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=100)

    def build() -> keras.Model:
        return dense(layers.Dense(4, activation="tanh"))

    return train(peer, build, x, y, optimizer=optimizer, epochs=1)


@program("jit_compile=True (XLA)", backends=("tensorflow", "jax"))
def compiled_by_xla(peer: Peer) -> Values:
    return train(peer, compiled={"jit_compile": True})


@program("ReduceLROnPlateau by the loss of such a validation", of_logs=True)
def plateau(peer: Peer) -> Values:
    reduce = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=1, min_delta=0.02)
    return train(peer, epochs=6, validation_data=(X[5:20], Y[5:20]), validation_batch_size=6, callbacks=[reduce])


@program("EarlyStopping(restore_best_weights) by it", of_logs=True)
def early_stopping(peer: Peer) -> Values:
    noise = np.random.default_rng(5).normal(size=Y.shape)
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
    validation = {"validation_data": (X[:15], noise[:15]), "validation_batch_size": 6}
    return train(peer, epochs=8, callbacks=[stop], **validation)
