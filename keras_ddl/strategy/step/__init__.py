"""Training steps of Keras and of the program: traced once on the global batch, and cut into ranks."""
