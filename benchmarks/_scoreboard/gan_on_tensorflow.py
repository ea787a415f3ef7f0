"""A GAN whose train_step uses two optimizers, as in Keras's DCGAN guide."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from _scoreboard.peers import Peer
from _scoreboard.programs.common import Values, dense, sgd, values_of


class Gan(keras.Model):
    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.peer = peer
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)])
        self.critic = dense(outputs=1)
        self.trackers = [keras.metrics.Mean(name="critic_loss"), keras.metrics.Mean(name="generator_loss")]

        self.built = True  # Keras asks for it under tf.distribute

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.trackers

    def compile(self, critic_optimizer: keras.Optimizer, generator_optimizer: keras.Optimizer) -> None:
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer

    def train_step(self, batch: Any) -> dict[str, Any]:
        noise, real = batch
        loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

        def mean(targets: Any, answers: Any) -> Any:
            return tf.reduce_mean(loss_of(targets, answers))

        made = self.generator(noise)
        with tf.GradientTape() as tape:
            answers = self.critic(tf.concat([made, real], axis=0))
            targets = tf.concat([tf.ones_like(made[:, :1]), tf.zeros_like(real[:, :1])], axis=0)
            critic_loss = mean(targets, answers)
            scaled = self.peer.scaled(critic_loss)
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights))
        with tf.GradientTape() as tape:
            answers = self.critic(self.generator(noise))
            generator_loss = mean(tf.zeros_like(answers), answers)
            scaled = self.peer.scaled(generator_loss)
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights))
        for tracker, loss in zip(self.trackers, (critic_loss, generator_loss)):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def train_gan(peer: Peer, noise: np.ndarray, real: np.ndarray, batch: int) -> Values:
    with peer.scope():
        model = Gan(peer)
        model.compile(sgd(), sgd())
    return values_of(model, peer.fit(model, noise, real, batch_size=batch, epochs=2))
