"""Temporary changes to TensorFlow by keras_ddl/compat/tensorflow.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.context import context

from keras_ddl.compat.tensorflow import as_array, optimized_once


@pytest.fixture(autouse=True)
def restored_options() -> Iterator[None]:
    before = context().function_call_options
    yield
    tf.config.optimizer.set_experimental_options({"layout_optimizer": True})
    context()._optimizer_experimental_options.clear()
    context().function_call_options = before


def rewriter() -> tf.compat.v1.ConfigProto:
    config = context().function_call_options.config_proto_serialized
    return tf.compat.v1.ConfigProto.FromString(config).graph_options.rewrite_options


def test_graphs_are_optimized_once_inside_the_context() -> None:
    assert rewriter().meta_optimizer_iterations == 0
    before = context().function_call_options
    with optimized_once():
        inside = rewriter()
        assert inside.meta_optimizer_iterations == inside.ONE
        assert inside.memory_optimization == inside.NO_MEM_OPT and inside.layout_optimizer == inside.OFF
        first = context().function_call_options
    assert context().function_call_options is before
    with optimized_once():  # other options would make TensorFlow optimize the graph again
        assert context().function_call_options is first


def test_options_set_by_the_program_are_kept() -> None:
    tf.config.optimizer.set_experimental_options({"layout_optimizer": True, "remapping": False})
    with optimized_once():
        inside = rewriter()
        assert inside.layout_optimizer == inside.ON and inside.remapping == inside.OFF
    tf.config.optimizer.set_experimental_options({"remapping": True})
    with optimized_once():
        assert rewriter().remapping == inside.ON


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "bool", "int64"])
def test_as_array_takes_scalars_of_every_dtype(dtype: str) -> None:
    for shape in ([], [2], [0, 3]):
        value = np.ones(shape, tf.as_dtype(dtype).as_numpy_dtype)
        np.testing.assert_array_equal(as_array(tf.constant(value)), value, strict=True)
    assert as_array(tf.Variable(value)).shape == (0, 3)
