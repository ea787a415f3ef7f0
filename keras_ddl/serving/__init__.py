"""A server for SavedModels that speaks TensorFlow Serving's gRPC and REST interfaces, to try a model with.

`keras-ddl serve` starts it. It is the default for a laptop and for tests; production has TensorFlow Serving itself,
from the same directory (docs/serving.md). Messages and stubs are those of tensorflow-serving-api. Importing this
package imports no TensorFlow.
"""
