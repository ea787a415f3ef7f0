"""TensorFlow Serving's protocol, apart from tensors: messages, errors, the model that a request is for."""
