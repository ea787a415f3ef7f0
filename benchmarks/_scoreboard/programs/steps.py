"""Training steps and loops of a program's own, as Keras's guides write them for each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from _scoreboard.peers import Peer
from _scoreboard.programs.common import BATCH, ROWS, Values, X, Y, dense, ops, program, sgd, train, values_of
from _scoreboard.steps import CustomStepModel

Gradients = list[Any]


def squares(y: Any, predicted: Any) -> Any:
    return ops.mean(ops.square(y - predicted), axis=-1)


@program("a train_step of its own, loss by hand")
def own_step(peer: Peer) -> Values:
    return by_hand(peer, lambda y, predicted: ops.mean(squares(y, predicted)))


@program("a train_step whose loss is divided by the batch's largest prediction")
def step_of_batch(peer: Peer) -> Values:
    return by_hand(peer, lambda y, predicted: ops.mean(squares(y, predicted / ops.max(ops.abs(predicted)))))


@program("a train_step that clips gradients by their global norm")
def clip_by_hand(peer: Peer) -> Values:
    def clip(gradients: Gradients) -> Gradients:
        norm = ops.sqrt(sum(ops.sum(ops.square(each)) for each in gradients))
        return [each * ops.minimum(1.0, 0.1 / norm) for each in gradients]

    return by_hand(peer, lambda y, predicted: ops.mean(squares(y, predicted)), clip)


def by_hand(
    peer: Peer, loss_of: Callable[[Any, Any], Any], change: Callable[[Gradients], Gradients] | None = None
) -> Values:
    def build() -> keras.Model:
        model = CustomStepModel(dense(), loss_of, change or (lambda gradients: gradients), peer.scaled)
        model.build((None, 6))
        return model

    return train(peer, build, loss=None)


@program("a GAN: train_step with two optimizers", backends=("tensorflow", "jax"))
def gan(peer: Peer) -> Values:
    if keras.backend.backend() == "jax":
        from _scoreboard.gan_on_jax import train_gan
    else:
        from _scoreboard.gan_on_tensorflow import train_gan
    noise = np.random.default_rng(4).normal(size=(ROWS, 3))
    return train_gan(peer, noise, X[:ROWS], BATCH)


@program("a loop of its own, over batches")
def own_loop(peer: Peer) -> Values:
    with peer.scope():
        model, optimizer = dense(), sgd()
        optimizer.build(model.trainable_variables)
    losses = peer.loop(model, optimizer, squares, X[:ROWS], Y[:ROWS], BATCH)
    return values_of(model, {"loss": losses} if losses else {})
