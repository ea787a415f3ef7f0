"""A model with a custom train_step, written as in Keras's guides on customizing fit for each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

BACKEND = keras.backend.backend()


class CustomStepModel(keras.Model):
    """Trains `inner` with a loss that train_step computes.

    Args:
        inner: a built model.
        loss_of: computes a scalar from a batch's targets and predictions.
        change: transforms gradients before they are applied.
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

        trainable, fixed, optimizer_state, metric_state = state

        def loss_and_fixed(trainable: Any) -> Any:
            predicted, after = self.stateless_call(trainable, fixed, x, training=True)
            return self.loss_of(y, predicted), after

        (loss, fixed), gradients = jax.value_and_grad(loss_and_fixed, has_aux=True)(trainable)
        trainable, optimizer_state = self.optimizer.stateless_apply(optimizer_state, self.change(gradients), trainable)
        metric_state = self.tracker.stateless_update_state(metric_state, loss)
        logs = {"loss": self.tracker.stateless_result(metric_state)}
        return logs, (trainable, fixed, optimizer_state, metric_state)

    def train_step(self, *arguments: Any) -> Any:
        if BACKEND == "jax":
            state, (x, y) = arguments
            return self._step_of_jax(state, x, y)
        ((x, y),) = arguments
        return (self._step_of_torch if BACKEND == "torch" else self._step_of_tensorflow)(x, y)
