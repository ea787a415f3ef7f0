"""Neural machine translation from one process to many, to be read in an evening and started from.

The data, in the order in which it is made:

    words.py     numbers, ordinals, years, dates and times of day in English and German words
    phrases.py   phrases around them, English with the German
    corpus.py    two text files of such phrases, a sentence a line; no held-out phrase is among those to learn from
    lines.py     a rank's range of the lines of such files, plain or gzip
    subwords.py  one vocabulary of subwords for both languages, trained on rank 0, the same on all ranks
    plan.py      which sentences meet in a batch, from their lengths alone, and which rank needs which
    batches.py   batches of a number of tokens for any Keras model, the same on any number of ranks

The models and their training:

    attention.py      Luong's attention, and that of several heads
    lstm.py           the recurrent model
    transformer.py    the Transformer, with one table
    losses.py         cross-entropy a token, with label smoothing
    settings.py       sizes, data and optimizer of a training: presets and flags
    training.py       the training on one rank or many, and its command
    averaging.py      the mean of the last checkpoints
    history.py        speed, loss and scores of each epoch, as a picture
    run_directory.py  what a training leaves on disk, and the model in it

Evaluation and inference, with the same weights:

    beam.py        beam search by TensorFlow's own operations
    inference.py   the graph that translates, and a function of sentences
    scores.py      exact match and BLEU
    evaluation.py  held-out sentences, translated by all ranks

What is exported, for servers, which run no Python, and for `python -m translation "a phrase"`:

    text.py      the subwords of sentences, and sentences of subwords, by TensorFlow's own operations
    serving.py   the signature `translate`, from strings to strings
    __main__.py  asks the newest export

and studies/, commands that measure, compute and predict what many ranks cost.

`pip install '.[translation]'` in a checkout brings what it needs. The folder that holds this one must be on the path of
Python: start it from examples/, or with PYTHONPATH=examples.
"""

DEFAULT_OUTPUT = "translation-output"
