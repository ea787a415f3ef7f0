"""TensorFlow's operations by what they do to rows; who made one."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_ddl.compat import tensorflow as tf_compat

# Keep what they are given, whatever that is.
SAME = frozenset(
    (
        "Identity", "IdentityN", "Cast", "Neg", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics",
        "PlaceholderWithDefault", "EnsureShape", "OptimizationBarrier", "DebugGradientIdentity",
    )
)  # fmt: skip
SUMS_OF_INPUTS = frozenset(
    (
        "Add", "AddV2", "Sub", "AddN", "BiasAdd", "Pack", "ConcatV2", "SelectV2", "Select",
    )
)  # fmt: skip
# Linear in their first input where the others are independent of the rows.
LINEAR_IN_FIRST = frozenset(
    (
        "Reshape", "Squeeze", "ExpandDims", "BroadcastTo", "Tile", "StridedSlice", "Slice", "GatherV2",
        "Unpack", "Transpose", "Pad", "PadV2", "Reverse", "ReverseV2", "Cumsum",
    )
)  # fmt: skip
QUOTIENTS = frozenset(
    (
        "RealDiv", "Div", "DivNoNan", "Xdivy",
    )
)  # fmt: skip
PRODUCTS = frozenset(
    (
        "Mul", "MulNoNan", "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D",
    )
)  # fmt: skip
REDUCTIONS = frozenset(
    (
        "Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm",
    )
)  # fmt: skip
# Their results lie along dimension 0 as the rows do, but are not one for each row.
SOME_ROWS = frozenset(
    (
        "Where", "GatherNd", "DynamicPartition", "DynamicStitch", "Unique", "UniqueV2", "UniqueWithCounts",
        "UniqueWithCountsV2", "Bincount", "RaggedGather", "RaggedRange", "NonMaxSuppressionV3",
        "RandomShuffle",
    )
)  # fmt: skip
ALONG_LAST = frozenset(
    (
        "Softmax", "LogSoftmax", "TopKV2",
    )
)  # fmt: skip
COLLECTIVES = frozenset(
    (
        "DdlAllReduce", "DdlAllReduceN", "DdlBroadcast", "DdlAllGather", "DdlAllToAll",
    )
)  # fmt: skip
CALLS = frozenset(
    (
        "PartitionedCall", "StatefulPartitionedCall",
    )
)  # fmt: skip
FLOW = frozenset(("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"))
# Their own gradients and values concern this rank's rows by definition: keras.layers normalise, mask, and count.
LAYERS = ("keras/src/layers/", "tensorflow/python/ops/parallel_for/")
CALLS_LAYERS = "layers/layer.py"
LIBRARIES = ("/keras/src/", "/tensorflow/python/", "/keras_ddl/strategy/", "/keras_ddl/ops/")


def is_reduction(operation: Any) -> bool:
    return operation.type in REDUCTIONS or operation.type.startswith("UnsortedSegment")


def is_times(tensor: Any, factor: int) -> bool:
    """Whether a tensor is another one times a constant `factor`."""
    while tensor.op.type in SAME:
        tensor = tensor.op.inputs[0]
    constants = [tf_compat.constant_value(each) for each in tensor.op.inputs] if tensor.op.type == "Mul" else []
    return any(each is not None and np.all(each == factor) for each in constants)


def in_layer(operation: Any) -> bool:
    """Whether a layer of Keras has made the operation, rather than a layer of the program's, which Keras calls."""
    for frame in reversed(list(operation.traceback or ())):
        path = frame.filename.replace("\\", "/")
        if any(each in path for each in LAYERS) and not path.endswith(CALLS_LAYERS):
            return True
        if not any(each in path for each in LIBRARIES):
            return False
    return False


def key_of(tensor: Any) -> tuple[int, str, int]:
    """Returns what tells a symbolic tensor from all others."""
    return id(tensor.graph), tensor.op.name, tensor.value_index
