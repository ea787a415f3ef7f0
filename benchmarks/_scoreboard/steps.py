"""A model with a train_step of its own, as Keras's guides on customizing fit write it for each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

BACKEND = keras.backend.backend()


class ByHand(keras.Model):
    """Trains `inner` with a loss that train_step computes.

    Args:
        inner: a built model.
        loss_of: from targets and predictions of a batch to a scalar.
        change: what is done to gradients before they are applied.
        scaled: divides a loss as the peer's documentation demands.
    """

    def __init__(
        self,
        inner: keras.Model,
        loss_of: Callable[[Any, Any], Any],
        change: Callable[[list[Any]], list[Any]],
        scaled: Callable[[Any], Any],
    ) -> None:
        super().__init__()
        self.inner, self.loss_of, self.change, self.scaled = inner, loss_of, change, scaled
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.inner(x, training=training)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def _step_of_tensorflow(self, x: Any, y: Any) -> dict[str, Any]:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
            scaled = self.scaled(loss)
        gradients = self.change(tape.gradient(scaled, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def _step_of_torch(self, x: Any, y: Any) -> dict[str, Any]:
        import torch

        self.zero_grad()
        loss = self.loss_of(y, self(x, training=True))
        loss.backward()
        with torch.no_grad():
            gradients = self.change([each.value.grad for each in self.trainable_variables])
            self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def _step_of_jax(self, state: Any, x: Any, y: Any) -> Any:
        import jax

        trainable, fixed, of_optimizer, of_metrics = state

        def loss_and_fixed(trainable: Any) -> Any:
            predicted, after = self.stateless_call(trainable, fixed, x, training=True)
            return self.loss_of(y, predicted), after

        (loss, fixed), gradients = jax.value_and_grad(loss_and_fixed, has_aux=True)(trainable)
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, self.change(gradients), trainable)
        of_metrics = self.tracker.stateless_update_state(of_metrics, loss)
        logs = {"loss": self.tracker.stateless_result(of_metrics)}
        return logs, (trainable, fixed, of_optimizer, of_metrics)

    def train_step(self, *arguments: Any) -> Any:
        if BACKEND == "jax":
            state, (x, y) = arguments
            return self._step_of_jax(state, x, y)
        ((x, y),) = arguments
        return (self._step_of_torch if BACKEND == "torch" else self._step_of_tensorflow)(x, y)
