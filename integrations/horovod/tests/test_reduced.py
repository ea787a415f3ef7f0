"""Finds out which gradients are already reduced."""

from __future__ import annotations

import pytest

from keras_ddl.compat.tensorflow import tf
from keras_ddl.gradients import reduced
from keras_ddl.gradients.reduced import computed_from
from keras_ddl.horovod.basics import ReduceOp
from keras_ddl.horovod.reduction import GradientReduction


def test_graph_is_walked_once_for_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    monkeypatch.setattr(reduced, "computed_from", lambda sources: (walks.append(1), computed_from(sources))[1])
    variables = [tf.Variable(1.0), tf.Variable(2.0), tf.Variable(3.0)]
    with tf.Graph().as_default():
        gradients = [tf.constant(1.0) for _ in variables]
        GradientReduction("once", op=ReduceOp.Sum).check_reduced_once(gradients, variables, accumulates=False)
    assert len(walks) == 1
