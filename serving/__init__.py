"""A server for SavedModels with TensorFlow Serving's gRPC and REST interfaces, for trying models.

`keras-ddl serve` starts it. It is meant for laptops and tests; in production, TensorFlow Serving serves the same
directory (docs/serving.md). Messages are those of tensorflow-serving-api, which need not be installed
(protocol/messages.py). Importing this package imports no TensorFlow.
"""
