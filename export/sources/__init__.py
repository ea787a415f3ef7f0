"""Where weights come from: checkpoints of keras_ddl, files of Keras and TensorFlow, graph-mode scripts."""
