"""The GAN of gan_on_tensorflow.py as a loop of stateless calls, as in Keras's guide to training loops in JAX."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np

from _scoreboard.peers import Peer
from _scoreboard.programs.common import Values, dense, ops, sgd, values_of


def train_gan(peer: Peer, noise: np.ndarray, real: np.ndarray, batch: int) -> Values:
    with peer.scope():
        generator, critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)]), dense(outputs=1)
        generator_optimizer, critic_optimizer = sgd(), sgd()
        generator_optimizer.build(generator.trainable_variables)
        critic_optimizer.build(critic.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def critic_loss(critic_weights: Any, generator_weights: Any, noise: Any, real: Any) -> Any:
        made, _ = generator.stateless_call(generator_weights, [], noise)
        answers, _ = critic.stateless_call(critic_weights, [], ops.concatenate([made, real]))
        targets = ops.concatenate([ops.ones((len(noise), 1)), ops.zeros((len(real), 1))])
        return loss_of(targets, answers)

    def generator_loss(generator_weights: Any, critic_weights: Any, noise: Any) -> Any:
        made, _ = generator.stateless_call(generator_weights, [], noise)
        answers, _ = critic.stateless_call(critic_weights, [], made)
        return loss_of(ops.zeros_like(answers), answers)

    @jax.jit
    def step(state: Any, noise: Any, real: Any) -> Any:
        generator_weights, critic_weights, generator_slots, critic_slots = state
        first, gradients = jax.value_and_grad(critic_loss)(critic_weights, generator_weights, noise, real)
        critic_weights, critic_slots = critic_optimizer.stateless_apply(critic_slots, gradients, critic_weights)
        second, gradients = jax.value_and_grad(generator_loss)(generator_weights, critic_weights, noise)
        generator_weights, generator_slots = generator_optimizer.stateless_apply(
            generator_slots, gradients, generator_weights
        )
        return (first, second), (generator_weights, critic_weights, generator_slots, critic_slots)

    variables = [
        each.trainable_variables if isinstance(each, keras.Model) else each.variables
        for each in (generator, critic, generator_optimizer, critic_optimizer)
    ]
    state = [[each.value for each in part] for part in variables]
    losses = []
    for _ in range(2):
        for begin in range(0, len(real), batch):
            rows = slice(begin, begin + batch)
            both, state = step(state, peer.share(noise[rows]), peer.share(real[rows]))
            losses.append([float(each) for each in both])
    for part, values in zip(variables, state):
        for variable, value in zip(part, values):
            variable.assign(value)
    critic_losses, generator_losses = np.transpose(losses)
    logs = {"critic_loss": critic_losses, "generator_loss": generator_losses}
    return values_of(critic, logs) | {f"weight of {k}": v for k, v in values_of(generator, {}).items()}
