"""Trains KerasHub's BERT as a classifier of sentences; small vocabulary, random weights."""

import keras
import keras_hub
import tensorflow as tf

import keras_ddl

keras.utils.set_random_seed(1)
GOOD, BAD = ("a fine film", "we laughed a lot", "the best of the year"), ("a dull film", "we slept", "the worst of all")
sentences = [f"{text} , said {who}" for who in ("anna", "ben", "carla", "dan") for text in (*GOOD, *BAD)]
labels = [1, 1, 1, 0, 0, 0] * 4

vocabulary = keras_hub.tokenizers.compute_word_piece_vocabulary(
    tf.data.Dataset.from_tensor_slices(sentences),
    vocabulary_size=80,
    lowercase=True,
    reserved_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
)
tokenizer = keras_hub.models.BertTokenizer(vocabulary=vocabulary, lowercase=True)
preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=16)

strategy = keras_ddl.Strategy()
with strategy.scope():
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=16,
        dropout=0.1,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor)
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
history = model.fit(sentences, labels, batch_size=7, epochs=2, verbose=2)
outputs = model.predict(["a fine year", "anna slept"], verbose=0)
