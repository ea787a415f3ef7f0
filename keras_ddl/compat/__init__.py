"""The only modules that use private interfaces of TensorFlow and Keras."""
