"""Neural machine translation from one process to many, to be read in an evening and started from.

The data, in the order in which it is made:

    words.py     numbers, ordinals, years, dates and times of day in English and German words
    phrases.py   phrases around them, English with the German
    corpus.py    two text files of such phrases, a sentence a line; no held-out phrase is among those to learn from
    lines.py     a rank's range of the lines of such files, plain or gzip
    subwords.py  one vocabulary of subwords for both languages, trained on rank 0, the same on all ranks
    plan.py      which sentences meet in a batch, from their lengths alone, and which rank needs which
    batches.py   batches of a number of tokens for any Keras model, the same on any number of ranks

What is exported, for servers, which run no Python, and for `python -m translation "a phrase"`:

    text.py      the subwords of sentences, and sentences of subwords, by TensorFlow's own operations
    serving.py   the signature `translate`, from strings to strings
    __main__.py  asks the newest export

and studies/, commands that measure, compute and predict what many ranks cost.

`pip install 'keras_ddl[translation]'` brings what it needs. The folder that holds this one must be on the path of
Python: start it from examples/, or with PYTHONPATH=examples.
"""

DEFAULT_OUTPUT = "translation-output"
