"""Saving and restoring on a mesh of 2 x 2 ranks. Run by test_mesh.py."""

import contextlib
import errno
import os
from typing import Any

import keras
import numpy as np
import pytest

import keras_ddl
from keras_ddl import checkpoint as ckpt
from keras_ddl import parts
from keras_ddl.checkpoint.snapshot import Snapshot
from keras_ddl.errors import CheckpointError
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.shards.laid_out import LaidOutVariable
from strategy import kept_weights
from strategy.common import RANK, X, Y, assert_close, fitted, gathers, shared_folder
from strategy.mesh_models import STRATEGY, alone, assert_equal, assert_saved_in_slices, compiled, dense, fit_both


def check_ranks_write_and_read_their_slices_of_a_checkpoint():
    with shared_folder() as path, gathers() as gathered:
        for epochs in (1, 2):
            save = [keras_ddl.callbacks.Checkpoint(path, resume=True, save_best=False)]
            if not parts.is_missing("export"):
                save.append(keras_ddl.callbacks.ExportBase(sample=X[:3]))
            model = fitted(STRATEGY, dense, epochs=epochs, callbacks=save)
        assert gathered == []
        one = fitted(None, dense)
        assert_equal(model, one)
        saved = ckpt.latest(path)
        assert_saved_in_slices(saved, one)
        if parts.is_missing("export"):
            return
        with np.load(saved.path / "golden.npz") as golden:
            (answers,) = (golden[name] for name in golden.files if name.startswith("answers:"))
        np.testing.assert_allclose(answers, one.predict(X[:3], verbose=0), rtol=0, atol=1e-12)


def check_callbacks_store_and_set_slices_of_weights():
    kept_weights.check_equal_one_process(compiled, STRATEGY, assert_equal, gathers)


def check_a_resumed_run_has_the_best_weights_of_the_first():
    kept_weights.check_resumed_equals_one_process(compiled, STRATEGY, assert_equal)


def check_error_names_rank_that_cannot_write_and_rank_0_writes_if_others_cannot_see_the_directory():
    model, one = compiled(STRATEGY), compiled(None)
    options = {"batch_size": 10, "verbose": 0, "shuffle": False}
    with shared_folder() as path, pytest.MonkeyPatch.context() as patched, gathers() as gathered:
        save = keras_ddl.callbacks.Checkpoint(path, save_best=False, export_base=False)
        model.fit(X, Y, epochs=1, callbacks=[save], **options)

        def fail(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        if RANK == 1:
            patched.setattr(Snapshot, "write_bundles", fail)
        with pytest.raises(CheckpointError, match="rank 1: .*No space left" if RANK != 1 else "No space left"):
            model.fit(X, Y, epochs=2, initial_epoch=1, callbacks=[save], **options)
        keras_ddl.barrier()
        assert [entry.name for entry in path.iterdir()] == ["ckpt-00000005"]
        assert gathered == []
        patched.undo()
        if RANK in (1, 3):  # both hold the same slices
            patched.setattr(os, "access", lambda *_: False)
        here = {"save_best": False, "export_base": False, "resume": True}
        apart = keras_ddl.callbacks.Checkpoint(path / "apart", **here)
        with pytest.warns(UserWarning, match=r"rank\(s\) 1, 3 do not see") if RANK == 0 else contextlib.nullcontext():
            model.fit(X, Y, epochs=3, initial_epoch=2, callbacks=[apart], **options)
        assert (
            gathered == [] and len(list(ckpt.latest(path / "apart").path.glob("*.data-*"))) == 2
        )  # both written by rank 0
        again = compiled(STRATEGY)
        again.fit(X, Y, epochs=3, callbacks=[keras_ddl.callbacks.Checkpoint(path / "apart", **here)], **options)
        one.fit(X, Y, epochs=3, **options)
        assert_equal(again, one)


def check_a_model_is_saved_complete_and_loaded():
    model, one = compiled(STRATEGY), compiled(None)
    for each in (model, one):
        each.fit(X, Y, batch_size=10, verbose=0)
    with shared_folder() as folder:
        path = f"{folder}/model.keras"
        with STRATEGY.whole_model(model):
            model.save(path)
        keras_ddl.barrier()
        loaded = keras.models.load_model(path)
        assert_close(loaded.get_weights(), one.get_weights())
        again = compiled(STRATEGY)
        again.load_weights(path)
        np.testing.assert_allclose(
            again.evaluate(X, Y, batch_size=10, verbose=0), one.evaluate(X, Y, batch_size=10, verbose=0), atol=1e-12
        )


def check_interrupted_run_is_restored_with_cut_slots():
    options = {"batch_size": 10, "verbose": 0, "shuffle": False}

    def lost(epoch: int, _: Any = None) -> None:
        if epoch == 1:
            raise KeyError("lost")

    one = compiled(None)
    one.fit(X, Y, epochs=3, **options)
    with shared_folder() as folder:
        fails = keras.callbacks.LambdaCallback(on_epoch_begin=lost)
        backup = lambda: keras.callbacks.BackupAndRestore(f"{folder}/backup")  # noqa: E731
        with pytest.raises(KeyError):
            compiled(STRATEGY).fit(X, Y, epochs=3, callbacks=[backup(), fails], **options)
        again = compiled(STRATEGY)  # rank 0 builds its optimizer when training begins
        again.fit(X, Y, epochs=3, callbacks=[backup()], **options)
    assert_equal(again, one)
    slots = gathered_slots.slots_of(again.optimizer)
    assert len(slots) == 3 * 2 and all(isinstance(each, LaidOutVariable) for each in slots), slots


def check_optimizer_built_outside_the_scope_holds_slices():
    model, one = compiled(STRATEGY), alone()
    model.optimizer.build(model.trainable_variables)
    assert len(gathered_slots.slots_of(model.optimizer)) == 3 * 2
    fit_both(model, one, X, Y, batch_size=10, verbose=0)
    assert_equal(model, one)
