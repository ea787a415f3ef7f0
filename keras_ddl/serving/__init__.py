"""A server for SavedModels with TensorFlow Serving's gRPC and REST interfaces, for trying models.

`keras-ddl serve` starts it. It is meant for laptops and tests; in production, TensorFlow Serving serves the same
directory (docs/serving.md). Messages and stubs are those of tensorflow-serving-api. Importing this package imports no
TensorFlow.
"""
