"""Trains KerasHub's GPT-2 on a few sentences and generates text; small vocabulary of byte pairs, random weights."""

import keras
import keras_hub
import tokenizers

import keras_ddl

keras.utils.set_random_seed(1)
sentences = [
    f"{who} {does} the {what}" for who in ("anna", "ben") for does in ("sees", "hears") for what in ("sea", "wind")
]

pairs = tokenizers.ByteLevelBPETokenizer()
pairs.train_from_iterator(sentences, vocab_size=300, min_frequency=2, special_tokens=["<|endoftext|>"])
pairs.save_model(".", f"pairs-{keras_ddl.rank() if keras_ddl.is_initialized() else 0}")
tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary="pairs-0-vocab.json", merges="pairs-0-merges.txt")
preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=12)

strategy = keras_ddl.Strategy()
with strategy.scope():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=12,
        dropout=0.1,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)
    model.compile(
        optimizer=keras.optimizers.Adam(5e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        sampler="greedy",
    )
history = model.fit(sentences, batch_size=5, epochs=4, verbose=2)
written = model.generate("anna", max_length=8)
print("it writes:", written)
