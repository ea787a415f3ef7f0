"""Compares two checkpoints of TensorFlow: compare_checkpoints.py ONE OTHER. Prints the largest relative difference.

A variable's difference is relative to its largest element.
"""

import sys

import numpy as np
import tensorflow as tf

one, other = (tf.train.load_checkpoint(path) for path in sys.argv[1:3])
names = sorted(one.get_variable_to_shape_map())
assert names == sorted(other.get_variable_to_shape_map())
largest, floats = 0.0, 0
for name in names:
    a, b = one.get_tensor(name), other.get_tensor(name)
    if not np.issubdtype(a.dtype, np.floating):
        np.testing.assert_array_equal(a, b, name)
        continue
    floats += 1
    scale = np.abs(a).max()
    largest = max(largest, float(np.abs(a - b).max() / scale) if scale else float(np.abs(b).max()))
print(floats, "variables differ by", largest)
