"""The mean of the last checkpoints of a training, as the Transformer's authors took it (arXiv 1706.03762, section 6.1).

Near the end of a training the weights still wander about a good place; their mean lies closer to it than the last ones.
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

import keras_ddl
from keras_ddl import checkpoint, model_state


def average_checkpoints(model: keras.Model, directory: str | Path, last: int) -> list[int]:
    """Gives the model the mean of the weights of the newest checkpoints. COLLECTIVE.

    Rank 0 reads them; random numbers and the optimizer stay as they are.

    Args: model: built. directory: of callbacks.Checkpoint. last: how many, or as many as there are.
    Returns: their steps.
    Cost: twice the weights in memory of rank 0, and reading the checkpoints.
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
