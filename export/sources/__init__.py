"""Reads weights: from checkpoints of keras_ddl, files of Keras and TensorFlow, and graph-mode scripts."""
