"""Averages the last checkpoints of a training, like the Transformer's authors (arXiv 1706.03762, section 6.1).

Near the end of training the weights still wander around a good point, and their mean is closer to it than the last
weights.
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

import keras_ddl
from keras_ddl import checkpoint, model_state


def average_checkpoints(model: keras.Model, directory: str | Path, last: int) -> list[int]:
    """Gives the model the mean of the weights of the newest checkpoints. COLLECTIVE.

    Rank 0 reads the checkpoints; random numbers and the optimizer stay unchanged.

    Args:
        model: a built model.
        directory: the directory of callbacks.Checkpoint.
        last: how many checkpoints; fewer if there are not as many.
    Returns: the steps of the checkpoints.
    Cost: twice the weights in rank 0's memory, and reading the checkpoints.
    """
    steps: list[int] = []
    variables = model.trainable_variables
    if keras_ddl.rank() == 0:
        total = [np.zeros(variable.shape) for variable in variables]
        steps = [one.step for one in checkpoint.list_checkpoints(directory) if one.problem is None][-last:]
        for step in steps:
            model_state.restore_checkpoint(model, directory, step, optimizer=False, seeds="none")
            for sum_, variable in zip(total, variables):
                sum_ += variable.numpy()
        for sum_, variable in zip(total, variables):
            variable.assign(sum_ / len(steps))
    keras_ddl.broadcast_variables(variables, root=0)
    return keras_ddl.broadcast_object(steps)
