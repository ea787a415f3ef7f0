"""Homes of what TensorFlow and Keras do not make public."""
