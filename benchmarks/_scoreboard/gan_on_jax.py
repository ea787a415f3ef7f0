"""The GAN of gan_on_tensorflow.py as a loop of stateless calls, as Keras's guide on loops in JAX has it."""

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
        of_generator, of_critic = sgd(), sgd()
        of_generator.build(generator.trainable_variables)
        of_critic.build(critic.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def critic_loss(of_critic: Any, of_generator: Any, noise: Any, real: Any) -> Any:
        made, _ = generator.stateless_call(of_generator, [], noise)
        answers, _ = critic.stateless_call(of_critic, [], ops.concatenate([made, real]))
        targets = ops.concatenate([ops.ones((len(noise), 1)), ops.zeros((len(real), 1))])
        return loss_of(targets, answers)

    def generator_loss(of_generator: Any, of_critic: Any, noise: Any) -> Any:
        made, _ = generator.stateless_call(of_generator, [], noise)
        answers, _ = critic.stateless_call(of_critic, [], made)
        return loss_of(ops.zeros_like(answers), answers)

    @jax.jit
    def step(state: Any, noise: Any, real: Any) -> Any:
        makes, judges, slots_of_makes, slots_of_judges = state
        first, gradients = jax.value_and_grad(critic_loss)(judges, makes, noise, real)
        judges, slots_of_judges = of_critic.stateless_apply(slots_of_judges, gradients, judges)
        second, gradients = jax.value_and_grad(generator_loss)(makes, judges, noise)
        makes, slots_of_makes = of_generator.stateless_apply(slots_of_makes, gradients, makes)
        return (first, second), (makes, judges, slots_of_makes, slots_of_judges)

    variables = [
        each.trainable_variables if isinstance(each, keras.Model) else each.variables
        for each in (generator, critic, of_generator, of_critic)
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
    of_first, of_second = np.transpose(losses)
    logs = {"of_critic": of_first, "of_generator": of_second}
    return values_of(critic, logs) | {f"weight of {k}": v for k, v in values_of(generator, {}).items()}
