"""Layers that depend on the batch, keep state, share weights or draw random numbers."""

from __future__ import annotations

from typing import Any

import keras

from _scoreboard.peers import Peer
from _scoreboard.programs.common import SEQUENCES, TOKENS, Values, dense, layers, ops, program, train, with_draws


@program("BatchNormalization")
def batch_norm(peer: Peer) -> Values:
    return train(peer, lambda: dense(layers.BatchNormalization(momentum=0.8)))


@program("BatchNormalization(synchronized=True)")
def batch_norm_synchronized(peer: Peer) -> Values:
    return train(peer, lambda: dense(layers.BatchNormalization(momentum=0.8, synchronized=True)))


@program("GroupNormalization")
def group_norm(peer: Peer) -> Values:
    return train(peer, lambda: dense(layers.GroupNormalization(groups=4)))


@program("SpectralNormalization")
def spectral_norm(peer: Peer) -> Values:
    return train(peer, lambda: dense(layers.SpectralNormalization(layers.Dense(5))))


@program("a stateful LSTM: batch_shape, state from batch to batch")
def stateful_lstm(peer: Peer) -> Values:
    def build() -> keras.Model:
        inputs = keras.Input(batch_shape=(10, 5, 3))
        return keras.Model(inputs, layers.Dense(2)(layers.LSTM(4, stateful=True)(inputs)))

    return train(peer, build, SEQUENCES)


@program("an LSTM over padded rows (masks)")
def masked_lstm(peer: Peer) -> Values:
    def build() -> keras.Model:
        inputs = keras.Input((5,), dtype="int32")
        return keras.Model(inputs, layers.Dense(2)(layers.LSTM(4)(layers.Embedding(12, 4, mask_zero=True)(inputs))))

    return train(peer, build, TOKENS)


@program("Dropout with a seed")
def dropout(peer: Peer) -> Values:
    return with_draws(peer, lambda on: dense(layers.Dropout(0.4 * on, seed=3)))


@program("GaussianNoise with a seed")
def noise(peer: Peer) -> Values:
    return with_draws(peer, lambda on: dense(layers.GaussianNoise(0.3 * on, seed=3)))


@program("mixture of experts: each takes its top 4 rows of the batch")
def experts(peer: Peer) -> Values:
    class ExpertChoice(layers.Layer):
        """Zhou et al., arXiv 2202.09368."""

        def build(self, shape: Any) -> None:
            self.gate = self.add_weight(shape=(shape[-1], 3))
            self.kernel = self.add_weight(shape=(3, shape[-1], 5))

        def call(self, x: Any) -> Any:
            probabilities = ops.softmax(ops.matmul(x, self.gate))
            gates, rows = ops.top_k(ops.transpose(probabilities), k=4)  # [experts, 4]
            done = ops.tanh(ops.einsum("ekd,edh->ekh", ops.take(x, rows, axis=0), self.kernel))
            back = ops.equal(rows[..., None], ops.arange(ops.shape(x)[0], dtype=rows.dtype))
            return ops.einsum("ekr,ekh->rh", ops.cast(back, x.dtype) * gates[..., None], done)

        def compute_output_shape(self, shape: Any) -> Any:
            return (shape[0], 5)

    return train(peer, lambda: dense(ExpertChoice()))


@program("tied embeddings (ReversibleEmbedding)")
def tied(peer: Peer) -> Values:
    def build() -> keras.Model:
        inputs = keras.Input((5,), dtype="int32")
        table = layers.ReversibleEmbedding(12, 4)
        return keras.Model(inputs, table(layers.Dense(4, activation="tanh")(table(inputs)), reverse=True))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return train(peer, build, TOKENS, TOKENS[:, ::-1].copy(), loss=loss)


@program("an embedding of repeated tokens, with Adam")
def embedding(peer: Peer) -> Values:
    def build() -> keras.Model:
        inputs = keras.Input((5,), dtype="int32")
        return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layers.Embedding(12, 4)(inputs))))

    return train(peer, build, TOKENS, optimizer=lambda: keras.optimizers.Adam(0.01, epsilon=1e-3))


@program("LoRA (enable_lora), in float32", tolerance=1e-5)  # enable_lora makes float32 weights even in a float64 model
def lora(peer: Peer) -> Values:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")

    def build() -> keras.Model:
        model = dense()
        model.layers[0].enable_lora(rank=2)
        return model

    return train(peer, build)


class Codes(layers.Layer):
    """VQ-VAE's codebook of running means (van den Oord et al., arXiv 1711.00937)."""

    def build(self, shape: Any) -> None:
        random = {"initializer": "random_uniform", "trainable": False}
        self.codes = self.add_weight(shape=(5, shape[-1]), **random)
        self.sums = self.add_weight(shape=(5, shape[-1]), **random)
        self.counts = self.add_weight(shape=(5,), initializer="ones", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        distances = ops.sum(ops.square(x[:, None] - self.codes[None]), axis=-1)
        nearest = ops.one_hot(ops.argmin(distances, axis=1), 5, dtype=x.dtype)
        found = ops.matmul(nearest, self.codes)
        if training:
            counted = ops.stop_gradient(nearest)
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(counted, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(counted), ops.stop_gradient(x)))
            self.codes.assign(self.sums / self.counts[:, None])
        return x + ops.stop_gradient(found - x)


@program("a codebook of running means (VQ-VAE)")
def codebook(peer: Peer) -> Values:
    return train(peer, lambda: dense(Codes()))


@program("a layer that subtracts the mean of the batch")
def centred(peer: Peer) -> Values:
    class Centred(layers.Layer):
        def call(self, x: Any) -> Any:
            return x - ops.mean(x, axis=0)

    return train(peer, lambda: dense(Centred()))
