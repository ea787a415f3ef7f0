"""Ranks save once, completely, and with the statistics of all ranks. Run by test_strategy.py."""

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import (
    LAST,
    RANK,
    SIZE,
    STRATEGY,
    X,
    Y,
    assert_close,
    dense_model,
    everyone,
    keras,
    set_precision,
    shared_folder,
)


def trained(build=dense_model, **arguments):
    set_precision("float32")
    with STRATEGY.scope():
        model = build()
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X[:20], Y[:20], **{"batch_size": 10, "verbose": 0, **arguments})
    return model


SAVES = {
    "model.keras": lambda model, path: model.save(path),
    "function.keras": lambda model, path: keras.models.save_model(model, path, overwrite=False),
    "legacy.h5": lambda model, path: model.save(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "function.weights.h5": lambda model, path: keras.saving.save_weights(model, path),
    "sharded.weights.json": lambda model, path: model.save_weights(path, max_shard_size=3e-7),
    "folder": lambda model, path: model.save(path, zipped=False),
    "new/exported": lambda model, path: model.export(path, verbose=False),
}


def files_of(folder):
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):  # another rank may be removing its temporary folder
            return {str(p.relative_to(folder)): p.stat() for p in sorted(folder.rglob("*")) if p.is_file()}
    raise AssertionError(f"{folder} keeps changing")


@long
def check_saves_are_written_once_and_visible_on_all_ranks():
    model = trained()
    with shared_folder() as folder:
        for name, save in SAVES.items():
            if RANK == 0:
                time.sleep(0.1)  # the first rank to arrive writes
            save(model, folder / name)
            found = {k: (s.st_ino, s.st_mtime_ns) for k, s in files_of(folder).items()}
            on_all_ranks = everyone(found)
            later = {k: (s.st_ino, s.st_mtime_ns) for k, s in files_of(folder).items()}
            keras_ddl.barrier()  # no rank may start the next save before all have listed the files
            assert on_all_ranks == [later] * SIZE, f"{name}: complete when the call returns, and written once"
        assert not any(path.name.startswith(".") for path in folder.iterdir()), "no temporary files are left"
        assert {"sharded_00000.weights.h5", "new/exported/saved_model.pb", "folder/config.json"} <= set(later)
        expected = model.predict_on_batch(X[:4])
        for name in ("model.keras", "function.keras", "legacy.h5", "folder"):
            loaded = keras.models.load_model(folder / name, compile=False)  # Keras cannot read the "mse" of its .h5
            np.testing.assert_allclose(loaded(X[:4]), expected, rtol=0, atol=1e-6)
        for name in ("model.weights.h5", "function.weights.h5", "sharded.weights.json"):
            other = dense_model()
            other.load_weights(folder / name)
            np.testing.assert_allclose(other(X[:4]), expected, rtol=0, atol=1e-6)
        exported = tf.saved_model.load(str(folder / "new/exported"))
        np.testing.assert_allclose(exported.serve(tf.constant(X[:4], tf.float32)), expected, rtol=0, atol=1e-6)


@long
def check_other_files_are_written_once_and_visible_on_all_ranks():
    model = trained()
    module = tf.Module()
    module.value = tf.Variable(2.0)
    module.twice = tf.function(lambda: 2 * module.value, input_signature=[])
    checkpoint = tf.train.Checkpoint(model=model)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, [tf.TensorSpec([None, 6])])
    image, words = np.zeros((3, 3, 3)), keras.layers.StringLookup()
    words.adapt(["a", "b"])
    writes = {
        "archive": lambda path: archive.write_out(path, verbose=False),
        "module": lambda path: tf.saved_model.save(module, str(path)),
        "checkpoint": lambda path: checkpoint.write(path / "one"),
        "data": lambda path: tf.data.Dataset.range(5).save(str(path)),
        "text": lambda path: tf.io.write_file(str(path), "text"),
        "graph": lambda path: tf.io.write_graph(tf.Graph().as_graph_def(), str(path), "graph.pbtxt"),
        "image.png": lambda path: keras.utils.save_img(str(path), image),
        "assets": lambda path: (path.mkdir(exist_ok=True), words.save_assets(str(path)))[1],
    }
    with shared_folder() as folder:
        for name, write in writes.items():
            if RANK == 0:
                time.sleep(0.1)
            returned = everyone(write(folder / name))
            assert returned == [returned[0]] * SIZE, name
            files = everyone({k: (s.st_ino, s.st_mtime_ns) for k, s in files_of(folder).items()})
            assert files == [files[0]] * SIZE and any(each.startswith(name) for each in files[0]), name
            keras_ddl.barrier(name="around/else")
            for again in (True, False):  # each rank can read back its own file
                tf.io.write_file(str(folder / f"own_{RANK}"), f"{again}")
                assert (folder / f"own_{RANK}").read_text() == f"{again}"
            keras_ddl.barrier(name="around/own_else")
            for rank in range(SIZE):
                if rank == RANK:
                    (folder / f"own_{RANK}").unlink()
            keras_ddl.barrier(name="around/gone")
        assert list(tf.data.Dataset.load(str(folder / "data")).as_numpy_iterator()) == [0, 1, 2, 3, 4]
        loaded = tf.saved_model.load(str(folder / "module"))
        assert float(loaded.twice()) == 4.0
        manager = tf.train.CheckpointManager(checkpoint, str(folder / "managed"), max_to_keep=2)
        paths = [manager.save() for _ in range(4)]
        assert everyone([paths, list(manager.checkpoints)]) == [[paths, paths[-2:]]] * SIZE
        checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
        source = folder / "source"
        if RANK == 0:
            source.write_bytes(b"1" * 1000)
        keras_ddl.barrier(name="around/source")
        got = keras.utils.get_file("got", source.as_uri(), cache_dir=str(folder))
        assert Path(got).read_bytes() == b"1" * 1000


@long
def check_one_rank_may_save_alone_and_each_rank_to_its_own_path():
    model = trained()
    with shared_folder() as folder:
        for rank in range(SIZE):
            if rank == RANK:
                for _ in range(2):
                    model.save(folder / f"of_{rank}.keras")
                    (folder / f"of_{rank}.keras").unlink()
                model.save(folder / f"of_{rank}.keras")
        model.save_weights(folder / f"{RANK}.weights.h5")
        keras_ddl.barrier(name="around/own")
        assert set(files_of(folder)) == {n for r in range(SIZE) for n in (f"of_{r}.keras", f"{r}.weights.h5")}


def check_failed_save_keeps_the_earlier_file_and_raises_on_all_ranks():
    class Fails(keras.layers.Dense):
        fails = False

        def save_own_variables(self, store):
            if self.fails:
                raise OSError(28, "No space left on device")
            super().save_own_variables(store)

    model = trained(lambda: keras.Sequential([keras.Input((6,)), Fails(2)]))
    with shared_folder() as folder:
        path = folder / "model.weights.h5"
        model.save_weights(path)
        before = files_of(folder)["model.weights.h5"].st_mtime_ns
        model.layers[0].fails = True
        model.layers[0].bias.assign([5.0, 5.0])
        with pytest.raises(OSError, match="No space left"):
            model.save_weights(path)
        keras_ddl.barrier(name="around/failed")
        assert {k: s.st_mtime_ns for k, s in files_of(folder).items()} == {"model.weights.h5": before}
        with pytest.raises(FileNotFoundError, match=r"missing/model.keras") as caught:
            model.save(folder / "missing" / "model.keras")
        assert ".tmp" not in str(caught.value)


def with_statistics():
    return keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])


@long
def check_saves_within_an_epoch_hold_the_statistics_of_all_ranks():
    with shared_folder() as folder:
        path, seen = folder / "{batch}.weights.h5", []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append([w.copy() for w in self.model.get_weights()])

        saver = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
        parts = [saver, Look()] if RANK == 0 else [Look()]  # Horovod-style scripts pass it on rank 0 only
        trained(with_statistics, batch_size=5, callbacks=parts)
        names = sorted(files_of(folder))
        assert names == ["2.weights.h5", "4.weights.h5"], names
        saved = with_statistics()
        saved.load_weights(folder / "2.weights.h5")
        on_all_ranks = everyone(seen[1])
        assert_close(saved.get_weights(), on_all_ranks[LAST], 0)
        for mine, theirs in zip(*everyone(seen[0])[:2]):
            np.testing.assert_array_equal(mine, theirs)
