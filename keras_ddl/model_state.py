"""A model's weights and optimizer in checkpoints: keras_ddl/checkpoint/model_state.py under its public name."""

from keras_ddl.checkpoint.model_state import (
    restore_checkpoint,
    save_checkpoint,
    trackable,
    weights_of,
)

__all__ = ["restore_checkpoint", "save_checkpoint", "trackable", "weights_of"]
