"""Checkpoints that are exported while the training goes on."""

import keras
import numpy as np
import pytest

from keras_ddl import checkpoint, export, model_state
from keras_ddl.export.checkpoints.publisher import Publisher


def test_a_checkpoint_stays_while_it_is_exported(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    base = export.write_base_graph(model, tmp_path, sample=np.ones([2, 3], np.float32))
    saved = model_state.save_checkpoint(model, tmp_path, 1, base=base)
    (tmp_path / "served" / "7").mkdir(parents=True)
    publisher = Publisher(tmp_path, {None: tmp_path / "served"}, 5)
    with pytest.warns(UserWarning, match="version 7, higher than step 1: a server keeps serving that"):
        publisher.offer(saved)
        while publisher.is_busy(0.05) and not list((tmp_path / "served").glob(".tmp-*")):
            pass  # until it has begun
        model_state.save_checkpoint(model, tmp_path, 2, base=base)
        checkpoint.prune(tmp_path, 1)
        assert [each.step for each in checkpoint.list_checkpoints(tmp_path)] == [1, 2]
        while publisher.is_busy(1.0):
            pass
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == ["1", "7"]
    assert checkpoint.prune(tmp_path, 1) == [1]
