"""A tf.data pipeline without TensorFlow's tuner, where there is nothing to tune."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `dataset` without the tuner.

    Deleting the iterator of a tuned dataset may wait for the tuner for up to a minute: the tuner sleeps for as long as
    it has run, and if all cores are busy it can miss the signal to end.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
