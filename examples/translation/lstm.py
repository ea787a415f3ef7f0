"""The recurrent model: bidirectional LSTM encoder, Luong attention, LSTM decoder, as in TensorFlow's NMT tutorial."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from translation.attention import LuongAttention
from translation.subwords import PADDING

Tensor = Any


class LSTMTranslator(keras.Model):
    """Computes the logits of each next subword.

    Args:
        units: units of the decoder's LSTMs and of the encoder's, which have half of them in each direction; even.
        layers: layers of the encoder, and of the decoder. dropout: dropout of embeddings and of each LSTM's output.
    """

    def __init__(self, vocabulary: int, *, units: int = 512, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__(name="lstm_translator")
        if units % 2:
            raise ValueError(f"units: half of them read in each direction. Received: units={units}, an odd number.")
        self.source_table = keras.layers.Embedding(vocabulary, units, name="source_table")
        self.target_table = keras.layers.Embedding(vocabulary, units, name="target_table")
        self.dropout = keras.layers.Dropout(dropout)

        def lstm(units: int, name: str) -> keras.layers.Layer:
            return keras.layers.LSTM(units, return_sequences=True, return_state=True, name=name)

        self.encoder = [
            keras.layers.Bidirectional(lstm(units // 2, "direction"), name=f"encoder_{number}")
            for number in range(layers)
        ]
        self.decoder = [lstm(units, f"decoder_{number}") for number in range(layers)]
        self.attend = LuongAttention(units, name="attention")
        self.project = keras.layers.Dense(vocabulary, use_bias=False, name="project")

    def call(self, inputs: dict[str, Tensor], training: bool = False) -> Tensor:
        """Returns logits [rows, v, vocabulary] for inputs source [rows, w] and target [rows, v]."""
        memory = self.encode(inputs["source"], training)
        vectors, _ = self._decode(inputs["target"], memory, training)
        return self.project(self.dropout(vectors, training=training))

    def encode(self, source: Tensor, training: bool = False) -> dict[str, Tensor]:
        """Returns the decoder's input for source [rows, w]: keys, values, `keep`, and each layer's last state."""
        keep = source != PADDING
        x = self.dropout(self.source_table(source), training=training)
        memory = {"keep": ops.expand_dims(keep, 1)}
        for number, layer in enumerate(self.encoder):
            # The states are (output, cell) of the forward direction, then of the backward direction.
            x, *states = layer(x, mask=keep, training=training)
            x = self.dropout(x, training=training)
            for name, place in (("output", 0), ("cell", 1)):
                memory[f"{name}_{number}"] = ops.concatenate([states[place], states[place + 2]], axis=-1)
        memory["keys"], memory["values"] = self.attend.project(x)
        return memory

    def start(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the decoder's state before the first position, which is the encoder's last state."""
        return {name: value for name, value in memory.items() if name.startswith(("output_", "cell_"))}

    def step(
        self, ids: Tensor, position: Tensor, memory: dict[str, Tensor], state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns logits [rows, vocabulary] of the subword after `ids` [rows], and the state."""
        x = self.target_table(ids)
        after: dict[str, Tensor] = {}
        for number, layer in enumerate(self.decoder):
            names = f"output_{number}", f"cell_{number}"
            x, (after[names[0]], after[names[1]]) = layer.cell(x, [state[name] for name in names])
        vectors, _ = self.attend(ops.expand_dims(x, 1), (memory["keys"], memory["values"]), memory["keep"])
        return self.project(vectors)[:, 0], after

    def attention(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns the attention weights of each position of the target, [rows, v, w]."""
        return self._decode(target, self.encode(source), training=False)[1]

    def _decode(self, target: Tensor, memory: dict[str, Tensor], training: bool) -> tuple[Tensor, Tensor]:
        x = self.dropout(self.target_table(target), training=training)
        state = self.start(memory)
        for number, layer in enumerate(self.decoder):
            # No mask is needed, because padding comes after a target's end, where nothing is read any more.
            initial = [state[f"output_{number}"], state[f"cell_{number}"]]
            x = layer(x, initial_state=initial, training=training)[0]
            x = self.dropout(x, training=training)
        return self.attend(x, (memory["keys"], memory["values"]), memory["keep"])
