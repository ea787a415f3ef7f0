"""Checkpoints on disk: writes, lists, selects (latest, best) and verifies them.

    ckpt/ckpt-00000120/          one checkpoint: step 120
        weights.index, .data-*   a TensorFlow bundle, with the keys of the base graph's variables (model_state.py)
        optimizer.index, .data-* the optimizer's state, for an exact resume
        golden.npz               the base graph's outputs for the stored sample with these weights
        progress.json, .npz      the rest of a run's state (strategy/progress.py)
        state.json               step, epoch, metrics, size and SHA-256 of every file, and of itself
    ckpt/base/                   the servable graph (keras_ddl.export); base-<name>/ that of a part of the model
    ckpt/previous-1/             an earlier run's base and checkpoints (`set_aside`)

A checkpoint is written under a hidden name, synced and renamed, so a writer killed at any moment leaves no partial
checkpoint under its real name. Several ranks may write parts of its bundles; one process (rank 0) merges them and gives
the checkpoint its name. Any number of processes may read. Listing and choosing need neither Keras nor TensorFlow.
`model_state.save_checkpoint` and `restore_checkpoint` convert a model.
"""

from __future__ import annotations

from keras_ddl.checkpoint.choosing import best, find, latest
from keras_ddl.checkpoint.direction import resolve_mode
from keras_ddl.checkpoint.listing import Checkpoint, list_checkpoints
from keras_ddl.checkpoint.verifying import validate
from keras_ddl.checkpoint.writing import prune, set_aside, sweep_temporaries, write

__all__ = [
    "Checkpoint",
    "best",
    "find",
    "latest",
    "list_checkpoints",
    "prune",
    "resolve_mode",
    "set_aside",
    "sweep_temporaries",
    "validate",
    "write",
]


def __dir__() -> list[str]:
    return sorted(__all__)
