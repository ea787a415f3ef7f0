"""A tf.data pipeline without TensorFlow's tuner, where there is nothing to tune."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` without the tuner.

    Whoever deletes the iterator of a tuned one may have to wait for the tuner, up to a minute: it sleeps for as long as
    it has run, and when all cores are busy it can miss that it is to end.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
