"""Checkpoints exported during training, and the base graph that callbacks.Checkpoint writes."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ddl import callbacks, checkpoint, export, model_state
from keras_ddl.errors import ConfigError, ExportError
from keras_ddl.export.checkpoints.publisher import Publisher

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def compiled(layers):
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model


def fit(model, folder, rows=12, *beside):
    keep = callbacks.Checkpoint(folder, monitor="loss")
    model.fit(X[:rows], X[:rows, :1], batch_size=4, epochs=3, verbose=0, callbacks=[keep, *beside])


def test_checkpoint_is_kept_during_its_export(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    base = export.write_base_graph(model, tmp_path, sample=np.ones([2, 3], np.float32))
    saved = model_state.save_checkpoint(model, tmp_path, 1, base=base)
    (tmp_path / "served" / "7").mkdir(parents=True)
    publisher = Publisher(tmp_path, {None: tmp_path / "served"}, 5)
    with pytest.warns(UserWarning, match="version 7, which is higher than step 1"):
        publisher.offer(saved)
        while publisher.is_busy(0.05) and not list((tmp_path / "served").glob(".tmp-*")):
            pass  # until the export has begun
        model_state.save_checkpoint(model, tmp_path, 2, base=base)
        checkpoint.prune(tmp_path, 1)
        assert [each.step for each in checkpoint.list_checkpoints(tmp_path)] == [1, 2]
        while publisher.is_busy(1.0):
            pass
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == ["1", "7"]
    assert checkpoint.prune(tmp_path, 1) == [1]


@pytest.mark.parametrize("rows", [12, 4], ids=["several batches", "one batch"])
def test_base_graph_without_known_inputs_is_written_after_first_batch(tmp_path, rows):
    fit(compiled([keras.layers.Dense(1)]), tmp_path, rows)
    assert (tmp_path / "base" / "saved_model.pb").exists()
    assert all("golden.npz" in each.state["files"] for each in checkpoint.list_checkpoints(tmp_path))


@pytest.mark.long
def test_checkpoints_are_published_for_a_server(tmp_path):
    model, served = compiled([keras.Input((3,)), keras.layers.Dense(1)]), tmp_path / "served"
    fit(model, tmp_path / "ckpt", 12, callbacks.Publish(served, keep=1))
    # Of the checkpoints written during an export, the newest is published; it exists when fit returns.
    assert [entry.name for entry in served.iterdir() if entry.name.isdecimal()] == ["9"]
    record = json.loads((served / "9" / "assets.extra" / "keras_ddl_export.json").read_text())
    assert record["step"] == 9
    loaded = tf.saved_model.load(str(served / "9"))  # kept, because signatures do not keep the variables alive
    answer = loaded.signatures["serving_default"](inputs=tf.constant(X))
    np.testing.assert_allclose(next(iter(answer.values())), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def test_publish_refuses_bad_keep_and_directory(tmp_path):
    with pytest.raises(ConfigError, match="keep must be the number of versions to keep, 1 or more. Received"):
        callbacks.Publish(tmp_path / "served", keep=0)
    with pytest.raises(ConfigError, match=r"Pass callbacks=.*keras_ddl\.callbacks\.Publish\(directory\)"):
        callbacks.Checkpoint(tmp_path, publish_to=tmp_path / "served")
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="needs a directory"):
        fit(
            compiled([keras.Input((3,)), keras.layers.Dense(1)]),
            tmp_path / "ckpt",
            12,
            callbacks.Publish(tmp_path / "file"),
        )


def test_export_callbacks_need_one_checkpoint_that_writes_the_graph(tmp_path):
    model = compiled([keras.Input((3,)), keras.layers.Dense(1)])
    for beside in ([], [callbacks.Checkpoint(tmp_path, export_base=False)]):
        for one in (callbacks.ExportBase(), callbacks.Publish(tmp_path / "served")):
            with pytest.raises(
                ConfigError, match=f"{type(one).__name__} needs exactly one callbacks.Checkpoint in fit"
            ):
                model.fit(X, X[:, :1], verbose=0, callbacks=[*beside, one])
    two = [callbacks.Checkpoint(tmp_path), callbacks.ExportBase(), callbacks.ExportBase()]
    with pytest.raises(ConfigError, match="fit takes only one ExportBase. Received: 2 of them"):
        model.fit(X, X[:, :1], verbose=0, callbacks=two)
