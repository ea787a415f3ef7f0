"""The Transformer (Vaswani et al. 2017, arXiv 1706.03762) with one table for encoder, decoder and output projection.

Each sublayer normalises its input, instead of the sum after it (Xiong et al. 2020, arXiv 2002.04745), so the learning
rate needs less care. `normalize="after"` is the original.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from translation.attention import MultiHeadAttention, Projected
from translation.subwords import PADDING

Tensor = Any


class Transformer(keras.Model):
    """Predicts the logits of each next subword. The default sizes are the sizes of the paper's base model.

    One table [vocabulary, width] embeds source and target and, transposed, projects the decoder's output (Press and
    Wolf 2017, arXiv 1608.05859). Its gradient is the sum of two lists of rows and a whole table.

    Args:
        layers: number of layers of the encoder, and of the decoder.
        inner: width inside the feed-forward sublayers.
        dropout: dropout rate of sublayers' outputs, embeddings and attention weights.
        longest: largest number of positions in a sentence.
        normalize: "before" or "after" each sublayer.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 512,
        layers: int = 6,
        heads: int = 8,
        inner: int = 2048,
        dropout: float = 0.1,
        longest: int = 256,
        normalize: str = "before",
    ) -> None:
        super().__init__(name="transformer")
        if normalize not in ("before", "after"):
            raise ValueError(f"normalize must be 'before' or 'after'. Received: normalize={normalize!r}.")
        self.width, self.longest = width, longest
        self.table = self.add_weight(
            name="table", shape=(vocabulary, width), initializer=keras.initializers.RandomNormal(stddev=width**-0.5)
        )
        self.dropout = keras.layers.Dropout(dropout)
        sizes = {"width": width, "heads": heads, "inner": inner, "dropout": dropout, "normalize": normalize}
        self.encoder = [Block(**sizes, name=f"encoder_{number}") for number in range(layers)]
        self.decoder = [Block(**sizes, memory=True, name=f"decoder_{number}") for number in range(layers)]
        self.ends = [_normalization(name) if normalize == "before" else None for name in ("encoded", "decoded")]

    def call(self, inputs: dict[str, Tensor], training: bool = False) -> Tensor:
        """Returns logits [rows, v, vocabulary] for inputs source [rows, w] and target [rows, v]."""
        memory = self.encode(inputs["source"], training)
        return self._logits(self._decode(inputs["target"], memory, training)[0])

    def encode(self, source: Tensor, training: bool = False) -> dict[str, Tensor]:
        """Returns the memory of source [rows, w] for the decoder: each layer's keys and values, and `keep`."""
        keep = ops.expand_dims(source != PADDING, 1)
        x = self._embed(source, training=training)
        for block in self.encoder:
            x, _, _ = block(x, keep=keep, training=training)
        x = self._end(0, x)
        memory = {"keep": keep}
        for number, block in enumerate(self.decoder):
            memory[f"keys_{number}"], memory[f"values_{number}"] = block.memory_attention.project(x)
        return memory

    def start(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the decoder's state before the first position: each layer's keys and values, which are empty."""
        return {name: value[:, :, :0] for name, value in memory.items() if name != "keep"}

    def step(
        self, ids: Tensor, position: Tensor, memory: dict[str, Tensor], state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns logits [rows, vocabulary] of the ids after `ids` [rows] at `position`, and the new state."""
        x = self._embed(ops.expand_dims(ids, 1), position)
        after: dict[str, Tensor] = {}
        for number, block in enumerate(self.decoder):
            names = f"keys_{number}", f"values_{number}"
            earlier = tuple(state[name] for name in names)
            x, so_far, _ = block(x, memory=self._memory(memory, number), earlier=earlier)
            after.update(zip(names, so_far))
        return self._logits(x)[:, 0], after

    def attention(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns each target position's attention to the source, [rows, v, w]: the mean of the last layer's heads."""
        return ops.mean(self._decode(target, self.encode(source))[1], axis=1)

    def _decode(self, target: Tensor, memory: dict[str, Tensor], training: bool = False) -> tuple[Tensor, Tensor]:
        x = self._embed(target, training=training)
        places = ops.arange(ops.shape(target)[1])
        keep = ops.expand_dims(places[:, None] >= places, 0)  # a position sees itself and earlier positions
        for number, block in enumerate(self.decoder):
            x, _, weights = block(x, keep=keep, memory=self._memory(memory, number), training=training)
        return x, weights

    def _memory(self, memory: dict[str, Tensor], number: int) -> tuple[Tensor, ...]:
        return memory[f"keys_{number}"], memory[f"values_{number}"], memory["keep"]

    def _embed(self, ids: Tensor, position: Tensor = 0, training: bool = False) -> Tensor:
        x = ops.take(self.table, ids, axis=0) * self.width**0.5
        waves = ops.cast(ops.convert_to_tensor(_waves(self.longest, self.width)), x.dtype)
        waves = ops.slice(waves, (position, 0), (ops.shape(ids)[1], self.width))
        return self.dropout(x + waves, training=training)

    def _end(self, number: int, x: Tensor) -> Tensor:
        return x if self.ends[number] is None else self.ends[number](x)

    def _logits(self, x: Tensor) -> Tensor:
        x = self._end(1, x)
        return ops.matmul(x, ops.cast(ops.transpose(self.table), x.dtype))


class Block(keras.layers.Layer):
    """A layer of encoder or decoder: self-attention, attention to a memory (only in decoders), feed-forward."""

    def __init__(
        self, width: int, heads: int, inner: int, dropout: float, normalize: str, memory: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.before = normalize == "before"
        self.attention = MultiHeadAttention(width, heads, dropout, name="self_attention")
        self.memory_attention = MultiHeadAttention(width, heads, dropout, name="memory_attention") if memory else None
        self.widen = keras.layers.Dense(inner, activation="relu", name="widen")
        self.narrow = keras.layers.Dense(width, name="narrow")
        self.norms = [_normalization(f"norm_{number}") for number in range(2 + memory)]
        self.dropout = keras.layers.Dropout(dropout)

    def call(
        self,
        x: Tensor,
        keep: Tensor | None = None,
        memory: tuple[Tensor, ...] | None = None,
        earlier: Projected | None = None,
        training: bool = False,
    ) -> tuple[Tensor, Projected, Tensor]:
        """Returns x after the layer, keys and values of its self-attention, and the weights of its last attention.

        Args:
            x: [rows, positions, width].
            keep: positions that self-attention sees; None: all positions see all.
            memory: (keys, values, keep) for attention to a memory.
            earlier: keys and values of positions before x, which the positions of x also see.
        """
        seen: dict[str, Any] = {}

        def to_itself(x: Tensor) -> Tensor:
            seen["projected"] = self.attention.project(x)
            if earlier is not None:
                seen["projected"] = tuple(ops.concatenate(both, axis=2) for both in zip(earlier, seen["projected"]))
            answer, seen["weights"] = self.attention(x, seen["projected"], keep, training=training)
            return answer

        def to_memory(x: Tensor) -> Tensor:
            answer, seen["weights"] = self.memory_attention(x, memory[:2], memory[2], training=training)
            return answer

        def feed_forward(x: Tensor) -> Tensor:
            return self.narrow(self.widen(x))

        sublayers = [to_itself, feed_forward] if memory is None else [to_itself, to_memory, feed_forward]
        for sublayer, norm in zip(sublayers, self.norms):
            if self.before:
                x = x + self.dropout(sublayer(norm(x)), training=training)
            else:
                x = norm(x + self.dropout(sublayer(x), training=training))
        return x, seen["projected"], seen["weights"]


def _normalization(name: str) -> keras.layers.Layer:
    return keras.layers.LayerNormalization(epsilon=1e-6, name=name)


def _waves(longest: int, width: int) -> np.ndarray:
    """Returns sines and cosines of geometric wavelengths (section 3.5 of the paper), [longest, width]."""
    angles = np.arange(longest)[:, None] / 10_000 ** (2 * np.arange((width + 1) // 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)[:, :width]
