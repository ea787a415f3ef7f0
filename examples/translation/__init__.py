"""Neural machine translation on one rank or many, short enough to read in an evening and to build on.

The data, in the order in which it is made:

    words.py     numbers, ordinals, years, dates and times of day in English and German words
    phrases.py   phrases that contain them, in English and German
    corpus.py    two text files of such phrases, one sentence per line; no held-out phrase is in the training data
    lines.py     a rank's range of the lines of such files, plain or gzip
    subwords.py  one vocabulary of subwords for both languages, trained on rank 0, the same on all ranks
    plan.py      which sentences share a batch, planned from their lengths, and which sentences a rank needs
    batches.py   batches of a given number of tokens for any Keras model, the same on any number of ranks

The models and their training:

    attention.py      Luong's attention and multi-head attention
    lstm.py           the recurrent model
    transformer.py    the Transformer, with one shared table
    losses.py         cross-entropy per token, with label smoothing
    settings.py       sizes, data and optimizer of a training: presets and flags
    training.py       the training on one rank or many, and its command
    averaging.py      the mean of the last checkpoints
    history.py        speed, loss and scores of each epoch, as a picture
    run_directory.py  the files of a training, and the model in them

Evaluation and inference, with the same weights:

    beam.py        beam search in TensorFlow operations
    inference.py   the graph that translates, and a function of sentences
    scores.py      exact match and BLEU
    evaluation.py  translates held-out sentences on all ranks

The export, for servers, which run no Python, and for `python -m translation "a phrase"`:

    text.py      turns sentences into subwords and back in TensorFlow operations
    serving.py   the signature `translate`, from strings to strings
    __main__.py  translates with the newest export

studies/ has commands that measure, compute and predict the cost of many ranks.

`pip install '.[translation]'` in a checkout installs everything that this example needs. The folder that contains this
one must be on Python's path: start the commands in examples/, or with PYTHONPATH=examples.
"""

DEFAULT_OUTPUT = "translation-output"
