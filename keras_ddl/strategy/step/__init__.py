"""Traces training steps of Keras and of the program once on the global batch, and cuts them into ranks."""
